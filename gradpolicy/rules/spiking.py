"""Surrogates for the spike of a neuron.

The operation's input is the potential minus the threshold: ``torch.heaviside(potential - threshold, zero)``.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gradpolicy.rules.registry import Call, rule
from gradpolicy.rules.routing import Number, on_device_of, to_first
from gradpolicy.rules.steps import from_nearest_step


@rule("fast_sigmoid")
def fast_sigmoid(
    grad: Tensor,
    inputs: tuple[Tensor, ...],
    output: Tensor,
    *,
    slope: Number = 25.0,
    call: Call | None = None,
) -> Any:
    """Use the gradient of the fast sigmoid ``x / (1 + slope · |x|)``: heavy tails, no exponential.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = 1[x > 0]``       ``grad_x = grad_y / (slope · |x| + 1)²``
    ====================== =====================================================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        slope: How fast the gradient falls off.
        call: The call: if the operation rounds, x is counted from its nearest step.

    Source: Zenke, Ganguli 2018 (SuperSpike), arXiv:1705.11146.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.0, 0.04], requires_grad=True)
        >>> with gp.gradient_override({"heaviside": "fast_sigmoid"}):
        ...     torch.heaviside(x, torch.tensor(0.0)).sum().backward()
        >>> x.grad
        tensor([1.0000, 0.2500])
    """
    return to_first(
        grad / (on_device_of(slope, grad) * from_nearest_step(inputs, call).abs() + 1).square(), inputs
    )


@rule("arctan")
def arctan(
    grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor, *, alpha: Number = 2.0, call: Call | None = None
) -> Any:
    """Use the gradient of ``arctan(π/2 · alpha · x) / π + 1/2``.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = 1[x > 0]``       ``grad_x = alpha/2 / (1 + (π/2 · alpha · x)²) · grad_y``
    ====================== =====================================================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        alpha: Steepness; the stand-in's derivative at 0 is half of it.
        call: The call: if the operation rounds, x is counted from its nearest step.

    Source: Fang et al. 2021, arXiv:2007.05785.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.0, 1 / math.pi], requires_grad=True)
        >>> with gp.gradient_override({"heaviside": "arctan"}):
        ...     torch.heaviside(x, torch.tensor(0.0)).sum().backward()
        >>> x.grad
        tensor([1.0000, 0.5000])
    """
    alpha = on_device_of(alpha, grad)
    return to_first(
        grad * (alpha / 2 / (1 + (math.pi / 2 * alpha * from_nearest_step(inputs, call)).square())), inputs
    )


@rule("triangular")
def triangular(
    grad: Tensor,
    inputs: tuple[Tensor, ...],
    output: Tensor,
    *,
    height: Number = 1.0,
    width: Number = 1.0,
    call: Call | None = None,
) -> Any:
    """Use a triangle around the threshold as the gradient.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = 1[x > 0]``       ``grad_x = height · max(0, 1 − |x| / width) · grad_y``
    ====================== =====================================================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        height: The gradient at the threshold; the paper dampens it to 0.3.
        width: Half the base; the paper divides the potential by the threshold, which is a width of that size.
        call: The call: if the operation rounds, x is counted from its nearest step.

    Source: Bellec, Salaj, Subramoney, Legenstein, Maass 2018, arXiv:1803.09574.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([-2.0, 0.0, 0.5], requires_grad=True)
        >>> with gp.gradient_override({"heaviside": "triangular"}):
        ...     torch.heaviside(x, torch.tensor(0.0)).sum().backward()
        >>> x.grad
        tensor([0.0000, 1.0000, 0.5000])
    """
    rise = 1 - from_nearest_step(inputs, call).abs() / on_device_of(width, grad)
    return to_first(
        torch.where(rise > 0, grad * (on_device_of(height, grad) * rise), torch.zeros_like(grad)), inputs
    )
