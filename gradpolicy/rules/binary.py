"""Surrogates for the sign function of binary networks."""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.rules.registry import Call, rule
from gradpolicy.rules.routing import Number, on_device_of, to_first
from gradpolicy.rules.steps import from_nearest_step


@rule("approx_sign")
def approx_sign(grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor, *, call: Call | None = None) -> Any:
    """Use the gradient of a piecewise parabola, closer to the sign function than the clipped identity.

    ====================== =======================================================
    forward                backward
    ====================== =======================================================
    ``y = sign(x)``        ``grad_x = (2 − 2|x|) · grad_y`` where ``|x| ≤ 1``, else 0
    ====================== =======================================================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        call: The call: if the operation rounds, x is counted from its nearest step.

    Source: Liu et al. 2018 (Bi-Real Net), arXiv:1808.00278.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([-2.0, 0.0, 0.5], requires_grad=True)
        >>> with gp.gradient_override({"sign": "approx_sign"}):
        ...     torch.sign(x).sum().backward()
        >>> x.grad
        tensor([0., 2., 1.])
    """
    size = from_nearest_step(inputs, call).abs()
    return to_first(torch.where(size <= 1, grad * (2 - 2 * size), torch.zeros_like(grad)), inputs)


@rule("swish_sign")
def swish_sign(
    grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor, *, beta: Number = 5.0, call: Call | None = None
) -> Any:
    """Use the gradient of sign-swish, ``2σ(βx)(1 + βx(1 − σ(βx))) − 1``; it is negative far from 0.

    ====================== ==================================================================
    forward                backward
    ====================== ==================================================================
    ``y = sign(x)``        ``grad_x = β (2 − βx · tanh(βx/2)) / (1 + cosh(βx)) · grad_y``
    ====================== ==================================================================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        beta: β, how closely the stand-in follows the sign function.
        call: The call: if the operation rounds, x is counted from its nearest step.

    Source: Darabi et al. 2018 (regularized binary network training), arXiv:1812.11800.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.0, 0.5], requires_grad=True)
        >>> with gp.gradient_override({"sign": "swish_sign"}):
        ...     torch.sign(x).sum().backward()
        >>> x.grad
        tensor([ 5.0000, -0.0846])
    """
    beta = on_device_of(beta, grad)
    # Beyond 80 all is 0 in single precision; the bound keeps 0 · infinity out.
    scaled = (beta * from_nearest_step(inputs, call)).clamp(-80, 80)
    # 1 / (1 + cosh z) = 2 σ(z) σ(−z), which does not overflow in half precision.
    bell = 2 * torch.sigmoid(scaled) * torch.sigmoid(-scaled)
    return to_first(grad * (beta * (2 - scaled * torch.tanh(scaled / 2)) * bell), inputs)
