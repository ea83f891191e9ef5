"""Rules that pass the gradient on, stop it, or multiply it."""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.rules.registry import rule
from gradpolicy.rules.routing import Number, on_device_of, to_first, zeros_for


@rule("stop", reads=())
def stop(grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
    """Lets nothing through: every input gets exact zeros, also where the incoming gradient is not finite.

    ====================== ====================
    forward                backward
    ====================== ====================
    ``y = f(x)``           ``grad_x = 0``
    ====================== ====================

    Source: the "stop gradient" of computation graphs, as in ``tf.stop_gradient``.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> gp.apply("stop", torch.abs, x).sum().backward()
        >>> x.grad
        tensor([0., 0.])
    """
    zeros = tuple(zeros_for(tensor) for tensor in inputs)
    return zeros[0] if len(zeros) == 1 else zeros


@rule("identity", reads=(), each=True)
def identity(grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
    """Passes the gradient as it is to the first input: the straight-through estimator.

    ====================== ====================
    forward                backward
    ====================== ====================
    ``y = f(x)``           ``grad_x = grad_y``
    ====================== ====================

    Source: Bengio, Léonard, Courville 2013, arXiv:1308.3432.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> with gp.gradient_override({"round": "identity"}):
        ...     torch.round(x).sum().backward()
        >>> x.grad
        tensor([1., 1.])
    """
    return to_first(grad, inputs)


@rule("scale", reads=(), each=True)
def scale(grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor, *, factor: Number) -> Any:
    """Multiplies the gradient by a number. A factor of 0 gives exact zeros, also for infinite gradients.

    ====================== ==============================
    forward                backward
    ====================== ==============================
    ``y = f(x)``           ``grad_x = factor · grad_y``
    ====================== ==============================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        factor: A number, or a tensor, which may be a parameter.

    Source: a learning rate per branch, as in Fast R-CNN's and Caffe's ``lr_mult``, moved into the graph.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> gp.apply(gp.get_rule("scale", factor=0.5), torch.clone, x).sum().backward()
        >>> x.grad
        tensor([0.5000, 0.5000])
    """
    return to_first(_times(factor, grad), inputs)


@rule("reverse", reads=(), each=True)
def reverse(grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor, *, factor: Number = 1.0) -> Any:
    """Turns the gradient round: the gradient reversal layer of domain-adversarial training.

    ====================== ===============================
    forward                backward
    ====================== ===============================
    ``y = f(x)``           ``grad_x = −factor · grad_y``
    ====================== ===============================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        factor: A number, or a tensor, which may be a parameter; :class:`gradpolicy.schedules.Ganin` is the
            paper's ramp.

    Source: Ganin, Lempitsky 2015, arXiv:1409.7495.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> gp.apply("reverse", torch.clone, x).sum().backward()
        >>> x.grad
        tensor([-1., -1.])
    """
    return to_first(_times(-factor, grad), inputs)


def _times(factor: Number, grad: Tensor) -> Tensor:
    """``factor · grad`` in the gradient's dtype, with 0 · infinity = 0."""
    if not isinstance(factor, Tensor):
        return torch.zeros_like(grad) if factor == 0 else grad * factor
    multiplier: Tensor = on_device_of(factor, grad)
    product = (grad * multiplier).to(grad.dtype)
    if multiplier.requires_grad and torch.is_grad_enabled():
        # A learnt factor has a derivative at 0 too.
        return product
    return torch.where(multiplier == 0, torch.zeros_like(grad), product)
