"""Rules that pass, stop, gate, scale or reverse the gradient, or add noise to it."""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.rules.registry import Inputs, rule
from gradpolicy.rules.routing import Number, on_device_of, to_first, zeros_for


@rule("stop", reads=())
def stop(grad: Tensor, inputs: Inputs, output: Tensor) -> Any:
    """Stop the gradient: every input gets exact zeros, even if the incoming gradient is not finite.

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
def identity(grad: Tensor, inputs: Inputs, output: Tensor) -> Any:
    """Pass the gradient unchanged to the first input: the straight-through estimator.

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
def scale(grad: Tensor, inputs: Inputs, output: Tensor, *, factor: Number) -> Any:
    """Multiply the gradient by a number. A factor of 0 gives exact zeros, also for infinite gradients.

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
def reverse(grad: Tensor, inputs: Inputs, output: Tensor, *, factor: Number = 1.0) -> Any:
    """Reverse the gradient: the gradient reversal layer of domain-adversarial training.

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


@rule("noise", reads=(), each=True)
def noise(grad: Tensor, inputs: Inputs, output: Tensor, *, std: Number, loss_scale: Number = 1.0) -> Any:
    """Add normal noise to the gradient, drawn from torch's default generator of its device.

    ====================== ==========================================
    forward                backward
    ====================== ==========================================
    ``y = f(x)``           ``grad_x = grad_y + std · n, n ~ N(0, 1)``
    ====================== ==========================================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        std: The standard deviation; may be a schedule.
        loss_scale: The factor of the loss in fp16 training; the noise is multiplied by it too.

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


@rule("gate")
def gate(grad: Tensor, inputs: Inputs, output: Tensor) -> tuple[Tensor | None, ...] | Tensor:
    r"""Pass the gradient where a condition is true, and exact zeros elsewhere, even for infinite gradients.

    ================================== ==============================================================
    forward                            backward
    ================================== ==============================================================
    ``y = f(condition, a, b)``         ``grad_a = grad_y`` where the condition is true, else 0;
    \                                  ``grad_b = 0`` where the condition is true, else ``grad_y``
    ``y = f(x)``                       ``grad_x = grad_y`` where ``y ≠ 0``, else 0
    ================================== ==============================================================

    It gives any forward the gradient of ``torch.where(condition, a, b)``, as ``tf.where`` routes it.

    Args:
        grad: Gradient at the output.
        inputs: One boolean tensor, the condition, and one or two floating-point tensors, in any order: the
            first is chosen where the condition is true, the second where it is false. Or a floating-point
            tensor alone: the condition is then that the output is not 0.
        output: The operation's output.

    Raises:
        PolicyError: If the condition is missing, or there is more than one, or more than two to choose from.

    Source: ``tf.where`` and its gradient ``SelectV2``.

    Example:
        >>> import gradpolicy as gp
        >>> def keep_large(x, condition):
        ...     return torch.round(x) * condition
        >>> x = torch.tensor([0.4, 1.6], requires_grad=True)
        >>> gp.apply("gate", keep_large, x, x.detach() > 1).sum().backward()
        >>> x.grad
        tensor([0., 1.])
    """
    zeros = torch.zeros_like(grad)
    if len(inputs) == 1:
        return torch.where(output != 0, grad, zeros)
    conditions = [tensor for tensor in inputs if tensor.dtype == torch.bool]
    choices = [index for index, tensor in enumerate(inputs) if tensor.is_floating_point()]
    if len(conditions) != 1 or len(choices) not in (1, 2):
        kinds = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in inputs)
        raise PolicyError(
            f"rule 'gate': expects one boolean condition and one or two floating-point inputs, got ({kinds})"
        )
    routed = (torch.where(conditions[0], grad, zeros), torch.where(conditions[0], zeros, grad))
    gradients: list[Tensor | None] = [None] * len(inputs)
    for index, gradient in zip(choices, routed, strict=False):
        gradients[index] = gradient.sum_to_size(inputs[index].shape)
    return tuple(gradients)


def _times(factor: Number, grad: Tensor) -> Tensor:
    """Return ``factor · grad`` in the gradient's dtype, with 0 · infinity = 0."""
    if not isinstance(factor, Tensor):
        return torch.zeros_like(grad) if factor == 0 else grad * factor
    multiplier: Tensor = on_device_of(factor, grad)
    product = (grad * multiplier).to(grad.dtype)
    if multiplier.requires_grad and torch.is_grad_enabled():
        # A learned factor also has a derivative at 0.
        return product
    return torch.where(multiplier == 0, torch.zeros_like(grad), product)
