"""Surrogates for step-like operations: the gradient of a smooth stand-in.

All are zero or small far from 0, where the step is flat. For ``identity``, which is 1 everywhere, see
:mod:`gradpolicy.rules.passing`.
"""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.rules.registry import Call, rule
from gradpolicy.rules.routing import Number, first_input, on_device_of, times, to_first
from gradpolicy.rules.steps import from_nearest_step


@rule("hardtanh")
def hardtanh(
    grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor, *, minimum: Number = -1.0, maximum: Number = 1.0
) -> Any:
    """Pass the gradient where the input lies within a range, ends included: clipped straight-through.

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


@rule("tanh")
def tanh(
    grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor, *, slope: Number = 1.0, call: Call | None = None
) -> Any:
    """Use the gradient of ``tanh(slope · x)``.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = step(x)``        ``grad_x = slope · (1 − tanh²(slope · x)) · grad_y``
    ====================== =====================================================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        slope: Steepness of the stand-in at 0.
        call: The call: if the operation rounds, x is counted from its nearest step.

    Source: Gong et al. 2019 (differentiable soft quantization), arXiv:1908.05033.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> with gp.gradient_override({"sign": gp.get_rule("tanh", slope=2.0)}):
        ...     torch.sign(x).sum().backward()
        >>> x.grad
        tensor([2.0000, 0.1413])
    """
    slope = on_device_of(slope, grad)
    return to_first(
        grad * times(slope, 1 - torch.tanh(times(slope, from_nearest_step(inputs, call))).square()), inputs
    )


@rule("sigmoid")
def sigmoid(
    grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor, *, slope: Number = 1.0, call: Call | None = None
) -> Any:
    """Use the gradient of the logistic function ``σ(slope · x)``.

    ====================== ==============================================================
    forward                backward
    ====================== ==============================================================
    ``y = step(x)``        ``grad_x = slope · σ(slope · x) · σ(−slope · x) · grad_y``
    ====================== ==============================================================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        slope: Steepness; the stand-in's derivative at 0 is a quarter of it.
        call: The call: if the operation rounds, x is counted from its nearest step.

    Source: Neftci, Mostafa, Zenke 2019 (surrogate gradients), arXiv:1901.09948.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> with gp.gradient_override({"sign": "sigmoid"}):
        ...     torch.sign(x).sum().backward()
        >>> x.grad
        tensor([0.2500, 0.1966])
    """
    slope = on_device_of(slope, grad)
    scaled = times(slope, from_nearest_step(inputs, call))
    return to_first(grad * times(slope, torch.sigmoid(scaled) * torch.sigmoid(-scaled)), inputs)
