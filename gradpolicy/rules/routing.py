"""Which input a gradient belongs to: what the rules of element-wise operations share."""

from typing import Any

import torch
from torch import Tensor

# A rule's number: what the user wrote, or the 0-dimensional tensor into which a schedule writes.
Number = float | Tensor


def first_place(inputs: tuple[Tensor, ...]) -> int:
    """The place of the first input that can have a gradient: floating-point or complex; else 0."""
    for place, tensor in enumerate(inputs):
        if tensor.is_floating_point() or tensor.is_complex():
            return place
    return 0


def first_input(inputs: tuple[Tensor, ...]) -> Tensor:
    """The first input that can have a gradient: what a rule of one input is about."""
    return inputs[first_place(inputs)]


def to_first(gradient: Tensor, inputs: tuple[Tensor, ...]) -> Any:
    """Routes a gradient to the first input that can have one; the others get none.

    Where the operation broadcast that input, the gradient is summed over what was repeated.

    Args:
        gradient: The gradient, in the shape of the output.
        inputs: The operation's inputs.

    Returns:
        A tensor for one input, otherwise a tuple with ``None`` for every other input.
    """
    place = first_place(inputs)
    shape = inputs[place].shape
    if gradient.shape != shape and broadcasts(shape, gradient.shape):
        gradient = gradient.sum_to_size(shape)
    if len(inputs) == 1:
        return gradient
    return tuple(gradient if other == place else None for other in range(len(inputs)))


def near(number: Any, tensor: Tensor) -> Any:
    """A rule's number where a tensor is: a tensor on its device, a plain number as it is."""
    if not isinstance(number, Tensor):
        return number
    # From the processor to an accelerator the copy need not be waited for.
    return number.to(tensor.device, non_blocking=tensor.device.type != "cpu")


def zeros_for(tensor: Tensor) -> Tensor | None:
    """A gradient of exact zeros for a tensor; None for one that cannot have a gradient."""
    return torch.zeros_like(tensor) if tensor.is_floating_point() or tensor.is_complex() else None


def broadcasts(small: torch.Size, large: torch.Size) -> bool:
    """Whether a tensor of the small shape expands to the large one."""
    return len(small) <= len(large) and all(
        size in (1, wanted) for size, wanted in zip(reversed(small), reversed(large), strict=False)
    )
