"""Helpers of rules: the input that gets the gradient, and parameters on its device."""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, shown
from gradpolicy.rules.registry import Inputs

# A rule's number: what the user wrote, or the 0-dimensional tensor into which a schedule writes.
Number = float | Tensor


def is_differentiable(value: Any) -> bool:
    """Return True for a floating-point or complex tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def first_index(inputs: Inputs) -> int:
    """Return the index of the first floating-point or complex input; 0 if there is none."""
    for index, tensor in enumerate(inputs):
        if is_differentiable(tensor):
            return index
    return 0


def first_input(inputs: Inputs) -> Tensor:
    """Return the first input that can have a gradient."""
    return inputs[first_index(inputs)]


def to_first(gradient: Tensor, inputs: Inputs) -> Tensor:
    """Return the gradient of the first input that can have one, summed if that input was broadcast.

    If the operation broadcast that input, the gradient is summed over the dimensions that were repeated.

    Args:
        gradient: The gradient, in the shape of the output.
        inputs: The operation's inputs.
    """
    shape = first_input(inputs).shape
    if gradient.shape != shape and broadcasts(shape, gradient.shape):
        gradient = gradient.sum_to_size(shape)
    return gradient


def on_device_of(number: Any, tensor: Tensor) -> Any:
    """Return a parameter of a rule; if it is a tensor, on the device of the other tensor."""
    if not isinstance(number, Tensor):
        return number
    # Asynchronous copy from the CPU to an accelerator.
    return number.to(tensor.device, non_blocking=tensor.device.type != "cpu")


def check_above_zero(rule_name: str, key: str, number: Any) -> None:
    """Check that a parameter of a rule is above 0; values of a schedule are not checked.

    Raises:
        PolicyError: If it is not.
    """
    if isinstance(number, Tensor):
        return
    if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
        raise PolicyError(
            f"rule {rule_name!r}: {key} must be a number above 0, or a schedule; got {shown(number)}"
        )


def zeros_for(tensor: Tensor) -> Tensor | None:
    """Return a gradient of exact zeros for a tensor; None for one that cannot have a gradient."""
    return torch.zeros_like(tensor) if is_differentiable(tensor) else None


def broadcasts(small: torch.Size, large: torch.Size) -> bool:
    """Return True if a tensor of the small shape expands to the large one."""
    return len(small) <= len(large) and all(
        size in (1, wanted) for size, wanted in zip(reversed(small), reversed(large), strict=False)
    )
