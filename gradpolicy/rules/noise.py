"""The rule that adds noise to the gradient."""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.rules.registry import rule
from gradpolicy.rules.routing import Number, on_device_of, to_first


@rule("noise", reads=(), each=True)
def noise(
    grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor, *, std: Number, loss_scale: Number = 1.0
) -> Any:
    """Adds normal noise to the gradient, drawn from torch's own generator of the gradient's device.

    ====================== ==========================================
    forward                backward
    ====================== ==========================================
    ``y = f(x)``           ``grad_x = grad_y + std · n, n ~ N(0, 1)``
    ====================== ==========================================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        std: The standard deviation; may be a schedule, such as one that falls with the step.
        loss_scale: What the loss was multiplied by (fp16 training); the noise is multiplied by it too.

    Source: Neelakantan et al. 2015 (gradient noise for very deep networks), arXiv:1511.06807.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.zeros(1000, requires_grad=True)
        >>> gp.apply(gp.get_rule("noise", std=0.5), torch.clone, x).sum().backward()
        >>> abs(x.grad.mean() - 1) < 0.1, abs(x.grad.std() - 0.5) < 0.1
        (tensor(True), tensor(True))
    """
    if not isinstance(std, Tensor) and std == 0:
        return to_first(grad, inputs)
    drawn = torch.randn_like(grad) * on_device_of(std * loss_scale, grad)
    return to_first(grad + drawn.to(grad.dtype), inputs)
