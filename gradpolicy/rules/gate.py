"""A rule that passes the gradient where a condition is true."""

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.rules.registry import Inputs, rule


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
