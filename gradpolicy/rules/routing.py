"""Which input a gradient belongs to: what the rules of element-wise operations share."""

from typing import Any

import torch
from torch import Tensor

# A rule's number: what the user wrote, or the 0-dimensional tensor into which a schedule writes.
Number = float | Tensor


def to_first(gradient: Tensor, inputs: tuple[Tensor, ...]) -> Any:
    """Routes a gradient to an operation's first input; the others get none.

    Where the operation broadcast its first input, the gradient is summed over what was repeated.

    Args:
        gradient: The gradient, in the shape of the output.
        inputs: The operation's inputs.

    Returns:
        A tensor for one input, otherwise a tuple with ``None`` for every input but the first.
    """
    if gradient.shape != inputs[0].shape and _broadcasts(inputs[0].shape, gradient.shape):
        gradient = gradient.sum_to_size(inputs[0].shape)
    return gradient if len(inputs) == 1 else (gradient, *[None] * (len(inputs) - 1))


def near(number: Any, tensor: Tensor) -> Any:
    """A rule's number where a tensor is: a tensor on its device, a plain number as it is."""
    if not isinstance(number, Tensor):
        return number
    # From the processor to an accelerator the copy need not be waited for.
    return number.to(tensor.device, non_blocking=tensor.device.type != "cpu")


def zeros_for(tensor: Tensor) -> Tensor | None:
    """A gradient of exact zeros for a tensor; None for one that cannot have a gradient."""
    return torch.zeros_like(tensor) if tensor.is_floating_point() or tensor.is_complex() else None


def _broadcasts(small: torch.Size, large: torch.Size) -> bool:
    """Whether a tensor of the small shape expands to the large one."""
    return len(small) <= len(large) and all(
        size in (1, wanted) for size, wanted in zip(reversed(small), reversed(large), strict=False)
    )
