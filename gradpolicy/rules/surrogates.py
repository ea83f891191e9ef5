"""Surrogates for steps, signs and spikes: gradients of smooth functions.

All are zero or small far from the step. For ``identity``, which is 1 everywhere, see
:mod:`gradpolicy.rules.passing`. For a spike the operation's input is the potential minus the threshold:
``torch.heaviside(potential - threshold, zero)``.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.rules.registry import Call, Inputs, rule
from gradpolicy.rules.routing import Number, first_input, on_device_of, to_first

# Casts to integers, which round towards 0.
_CASTS = ("byte", "char", "int", "long", "short")


def surrogate(name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Any]]:
    """Register the derivative f' of an approximation of a step at 0 as the rule ``grad_x = f'(x) · grad_y``.

    If the operation rounds, x is the distance from the nearest step. Where f' is 0 the gradient is 0, even if
    the incoming gradient is not finite.

    Args:
        name: The rule's name. Its parameters are the keyword arguments of f'.
    """

    def register(derivative: Callable[..., Tensor]) -> Callable[..., Any]:
        def backward(
            grad: Tensor, inputs: Inputs, output: Tensor, *, call: Call | None = None, **numbers: Any
        ) -> Any:
            placed = {key: on_device_of(number, grad) for key, number in numbers.items()}
            slope = derivative(from_nearest_step(inputs, call), **placed)
            return to_first(torch.where(slope == 0, torch.zeros_like(grad), grad * slope), inputs)

        signature = inspect.signature(backward)
        of_rules = list(signature.parameters.values())[:-1]
        settings = list(inspect.signature(derivative).parameters.values())[1:]
        functools.update_wrapper(backward, derivative)
        backward.__signature__ = signature.replace(parameters=[*of_rules, *settings])  # type: ignore[attr-defined]
        return rule(name)(backward)

    return register


def from_nearest_step(inputs: Inputs, call: Call | None) -> Tensor:
    """Return the signed distance of the first input from the nearest step of the operation.

    The steps of ``round`` are half-way between integers, those of ``floor`` and ``ceil`` at integers, those
    of ``trunc`` and casts to integers at all integers but 0, those of ``x // n`` at multiples of n. The step
    of any other operation (``sign``, ``heaviside`` …) is at 0, so its input is returned unchanged.

    Raises:
        PolicyError: For ``n // x``, whose steps are not equidistant.
    """
    x = first_input(inputs)
    operation = "" if call is None else call.operation
    arguments = {} if call is None else call.arguments
    if operation == "round":
        # round(x, decimals=2) has a hundred times as many steps.
        scale = 10.0 ** (arguments.get("decimals") or 0)
        return x - (torch.floor(x * scale) + 0.5) / scale
    if operation in ("floor", "ceil"):
        return x - torch.round(x)
    if operation == "floor_divide":
        if not isinstance(arguments["input"], Tensor):
            raise PolicyError(
                "the steps of n // x are not equidistant in x; write torch.floor(n / x) instead"
            )
        return x - torch.round(x / arguments["other"]) * arguments["other"]
    if operation == "trunc" or operation in _CASTS:
        nearest = torch.round(x)
        return x - torch.where(nearest == 0, torch.where(x < 0, -1.0, 1.0).to(x.dtype), nearest)
    return x


@rule("hardtanh")
def hardtanh(
    grad: Tensor, inputs: Inputs, output: Tensor, *, minimum: Number = -1.0, maximum: Number = 1.0
) -> Any:
    """Pass the gradient where the input is within a closed range: clipped straight-through.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = step(x)``        ``grad_x = 1[minimum ≤ x ≤ maximum] · grad_y``
    ====================== =====================================================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        minimum: Lower end of the range.
        maximum: Upper end of the range.

    Source: Hubara, Courbariaux, Soudry, El-Yaniv, Bengio 2016, arXiv:1602.02830.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([-2.0, 0.5, 1.5], requires_grad=True)
        >>> with gp.gradient_override({"sign": "hardtanh"}):
        ...     torch.sign(x).sum().backward()
        >>> x.grad
        tensor([0., 1., 0.])
    """
    x = first_input(inputs)
    within = (x >= on_device_of(minimum, x)) & (x <= on_device_of(maximum, x))
    return to_first(torch.where(within, grad, torch.zeros_like(grad)), inputs)


@surrogate("tanh")
def tanh(x: Tensor, *, slope: Number = 1.0) -> Tensor:
    """Use the gradient of ``tanh(slope · x)``.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = step(x)``        ``grad_x = slope · (1 − tanh²(slope · x)) · grad_y``
    ====================== =====================================================

    Args:
        x: The distance of the operation's input from the nearest step.
        slope: The slope of the surrogate at 0.

    Source: Gong et al. 2019 (differentiable soft quantization), arXiv:1908.05033.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> with gp.gradient_override({"sign": gp.get_rule("tanh", slope=2.0)}):
        ...     torch.sign(x).sum().backward()
        >>> x.grad
        tensor([2.0000, 0.1413])
    """
    return slope * (1 - torch.tanh(slope * x).square())


@surrogate("sigmoid")
def sigmoid(x: Tensor, *, slope: Number = 1.0) -> Tensor:
    """Use the gradient of the logistic function ``σ(slope · x)``.

    ====================== ==============================================================
    forward                backward
    ====================== ==============================================================
    ``y = step(x)``        ``grad_x = slope · σ(slope · x) · σ(−slope · x) · grad_y``
    ====================== ==============================================================

    Args:
        x: The distance of the operation's input from the nearest step.
        slope: The steepness; the gradient at 0 is a quarter of it.

    Source: Neftci, Mostafa, Zenke 2019 (surrogate gradients), arXiv:1901.09948.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> with gp.gradient_override({"sign": "sigmoid"}):
        ...     torch.sign(x).sum().backward()
        >>> x.grad
        tensor([0.2500, 0.1966])
    """
    return slope * torch.sigmoid(slope * x) * torch.sigmoid(-slope * x)


@surrogate("approx_sign")
def approx_sign(x: Tensor) -> Tensor:
    """Use the gradient of a piecewise parabola, closer to the sign function than the clipped identity.

    ====================== =======================================================
    forward                backward
    ====================== =======================================================
    ``y = sign(x)``        ``grad_x = (2 − 2|x|) · grad_y`` where ``|x| ≤ 1``, else 0
    ====================== =======================================================

    Args:
        x: The distance of the operation's input from the nearest step.

    Source: Liu et al. 2018 (Bi-Real Net), arXiv:1808.00278.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([-2.0, 0.0, 0.5], requires_grad=True)
        >>> with gp.gradient_override({"sign": "approx_sign"}):
        ...     torch.sign(x).sum().backward()
        >>> x.grad
        tensor([0., 2., 1.])
    """
    return (2 - 2 * x.abs()).clamp(min=0)


@surrogate("swish_sign")
def swish_sign(x: Tensor, *, beta: Number = 5.0) -> Tensor:
    """Use the gradient of sign-swish, ``2σ(βx)(1 + βx(1 − σ(βx))) − 1``; it is negative far from 0.

    ====================== ==================================================================
    forward                backward
    ====================== ==================================================================
    ``y = sign(x)``        ``grad_x = β (2 − βx · tanh(βx/2)) / (1 + cosh(βx)) · grad_y``
    ====================== ==================================================================

    Args:
        x: The distance of the operation's input from the nearest step.
        beta: β, the steepness of the approximation of the sign function.

    Source: Darabi et al. 2018 (regularized binary network training), arXiv:1812.11800.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.0, 0.5], requires_grad=True)
        >>> with gp.gradient_override({"sign": "swish_sign"}):
        ...     torch.sign(x).sum().backward()
        >>> x.grad
        tensor([ 5.0000, -0.0846])
    """
    # Beyond 80 all is 0 in single precision; the bound keeps 0 · infinity out.
    scaled = (beta * x).clamp(-80, 80)
    # 1 / (1 + cosh z) = 2 σ(z) σ(−z), which does not overflow in half precision.
    bell = 2 * torch.sigmoid(scaled) * torch.sigmoid(-scaled)
    return beta * (2 - scaled * torch.tanh(scaled / 2)) * bell


@surrogate("fast_sigmoid")
def fast_sigmoid(x: Tensor, *, slope: Number = 25.0) -> Tensor:
    """Use the gradient of the fast sigmoid ``x / (1 + slope · |x|)``: heavy tails, no exponential.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = 1[x > 0]``       ``grad_x = grad_y / (slope · |x| + 1)²``
    ====================== =====================================================

    Args:
        x: The distance of the operation's input from the nearest step.
        slope: The rate at which the gradient falls off.

    Source: Zenke, Ganguli 2018 (SuperSpike), arXiv:1705.11146.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.0, 0.04], requires_grad=True)
        >>> with gp.gradient_override({"heaviside": "fast_sigmoid"}):
        ...     torch.heaviside(x, torch.tensor(0.0)).sum().backward()
        >>> x.grad
        tensor([1.0000, 0.2500])
    """
    return 1 / (slope * x.abs() + 1).square()


@surrogate("arctan")
def arctan(x: Tensor, *, alpha: Number = 2.0) -> Tensor:
    """Use the gradient of ``arctan(π/2 · alpha · x) / π + 1/2``.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = 1[x > 0]``       ``grad_x = alpha/2 / (1 + (π/2 · alpha · x)²) · grad_y``
    ====================== =====================================================

    Args:
        x: The distance of the operation's input from the nearest step.
        alpha: The steepness; the gradient at 0 is half of it.

    Source: Fang et al. 2021, arXiv:2007.05785.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.0, 1 / math.pi], requires_grad=True)
        >>> with gp.gradient_override({"heaviside": "arctan"}):
        ...     torch.heaviside(x, torch.tensor(0.0)).sum().backward()
        >>> x.grad
        tensor([1.0000, 0.5000])
    """
    return alpha / 2 / (1 + (math.pi / 2 * alpha * x).square())


@surrogate("triangular")
def triangular(x: Tensor, *, height: Number = 1.0, width: Number = 1.0) -> Tensor:
    """Use a triangle around the threshold as the gradient.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = 1[x > 0]``       ``grad_x = height · max(0, 1 − |x| / width) · grad_y``
    ====================== =====================================================

    Args:
        x: The distance of the operation's input from the nearest step.
        height: The gradient at the threshold; the paper dampens it to 0.3.
        width: Half the base; the paper divides the potential by the threshold, which is a width of that size.

    Source: Bellec, Salaj, Subramoney, Legenstein, Maass 2018, arXiv:1803.09574.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([-2.0, 0.0, 0.5], requires_grad=True)
        >>> with gp.gradient_override({"heaviside": "triangular"}):
        ...     torch.heaviside(x, torch.tensor(0.0)).sum().backward()
        >>> x.grad
        tensor([0.0000, 1.0000, 0.5000])
    """
    return height * (1 - x.abs() / width).clamp(min=0)
