"""The derivative of another function at the same inputs, as a rule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError


class Derivative:
    """The function of a rule ``grad · f'(inputs)``.

    If f takes fewer tensors than the operation has inputs, f gets the first ones; the others get no gradient.

    Args:
        function: f, tensors to one tensor.
        name: What messages call it, such as ``"operation 'tanh'"``.
    """

    def __init__(self, function: Callable[..., Tensor], name: str) -> None:
        self.function = function
        self.name = name

    def __call__(self, grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor) -> tuple:
        """The gradients of the inputs.

        Raises:
            PolicyError: If f takes none of the inputs, or its value has another shape than ``grad``.
        """
        count = self._accepted(inputs)
        pulled: Any = torch.func.vjp(self.function, *inputs[:count])
        value, pull_back = pulled
        if value.shape != grad.shape:
            raise PolicyError(
                f"{self.name} gives shape {tuple(value.shape)} at the inputs of an operation that gives "
                f"{tuple(grad.shape)}: its gradient cannot be used there"
            )
        return (*pull_back(grad.to(value.dtype)), *[None] * (len(inputs) - count))

    def _accepted(self, inputs: tuple[Tensor, ...]) -> int:
        """How many of the inputs the function takes."""
        if len(inputs) == 1:
            return 1
        meta = [torch.empty_like(tensor, device="meta") for tensor in inputs]
        for count in range(len(inputs), 0, -1):
            try:
                self.function(*meta[:count])
            except (TypeError, RuntimeError):
                continue
            return count
        raise PolicyError(f"{self.name} takes none of the inputs {[tuple(t.shape) for t in inputs]}")
