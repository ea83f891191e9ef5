"""The derivative of another function at the same inputs, as a rule."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, shown
from gradpolicy.imports import import_by_name
from gradpolicy.rules.registry import Call, Inputs, Rule
from gradpolicy.rules.routing import is_differentiable


class Derivative:
    """The function of a rule ``grad · f'(inputs)``.

    If f takes fewer tensors than the operation has inputs, f gets the first ones; the others get no gradient.

    Args:
        function: f, tensors to one tensor.
        name: Its name in messages, such as ``"operation 'tanh'"``.
    """

    def __init__(self, function: Callable[..., Tensor], name: str) -> None:
        self.function = function
        self.name = name

    def __call__(
        self, grad: Tensor, inputs: Inputs, output: Tensor, **parameters: Any
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, for these keyword arguments of f.

        Raises:
            PolicyError: If f takes none of the inputs, or its value has another shape than ``grad``.
        """
        function = functools.partial(self.function, **parameters) if parameters else self.function
        given = inputs[: self._accepted(function, inputs)]
        places = [place for place, tensor in enumerate(given) if is_differentiable(tensor)]

        def of_these(*tensors: Tensor) -> Tensor:
            values = list(given)
            for place, tensor in zip(places, tensors, strict=True):
                values[place] = tensor
            return function(*values)

        pulled: Any = torch.func.vjp(of_these, *(given[place] for place in places))
        value, pull_back = pulled
        if value.shape != grad.shape:
            raise PolicyError(
                f"{self.name} gives shape {tuple(value.shape)} at the inputs of an operation that gives "
                f"{tuple(grad.shape)}: its gradient cannot be used there"
            )
        found = dict(zip(places, pull_back(grad.to(value.dtype)), strict=True))
        return tuple(found.get(place) for place in range(len(inputs)))

    def _accepted(self, function: Callable[..., Tensor], inputs: Inputs) -> int:
        """Return how many of the inputs the function takes."""
        if len(inputs) == 1:
            return 1
        meta = [torch.empty_like(tensor, device="meta") for tensor in inputs]
        for count in range(len(inputs), 0, -1):
            try:
                function(*meta[:count])
            except (TypeError, RuntimeError):
                continue
            return count
        raise PolicyError(f"{self.name} takes none of the inputs {[tuple(t.shape) for t in inputs]}")


class OperationDerivative(Derivative):
    """The function of a rule that is the derivative of another operation.

    Settings that both operations have, such as ``dim``, are those of the call.

    Args:
        function: The other operation.
        name: Its name in messages.
        settings: The names of its parameters.
    """

    def __init__(self, function: Callable[..., Tensor], name: str, settings: Collection[str]) -> None:
        super().__init__(function, name)
        self.settings = frozenset(settings) - {"input", "out"}

    def __call__(  # type: ignore[override]
        self, grad: Tensor, inputs: Inputs, output: Tensor, *, call: Call
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs."""
        shared = {
            name: value
            for name, value in call.arguments.items()
            if name in self.settings and _is_setting(value)
        }
        return super().__call__(grad, inputs, output, **shared)


def _is_setting(value: Any) -> bool:
    """Return True for numbers, strings and lists of them; tensors are inputs."""
    if isinstance(value, tuple | list):
        return not any(isinstance(item, Tensor) for item in value)
    return isinstance(value, bool | int | float | str)


def gradient_of(function: Callable[..., Tensor] | str, **parameters: Any) -> Rule:
    """Return a rule that is the exact derivative of another function at the same inputs.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = operation(x)``   ``grad_x = f'(x) · grad_y``
    ====================== =====================================================

    Args:
        function: f, tensors to one tensor of the output's shape, made of differentiable torch operations; or
            the dotted path to it. If it takes fewer tensors than the operation has inputs, it gets the first.
        **parameters: Its keyword arguments; each may be a schedule.

    Raises:
        PolicyError: If there is no such function.

    Example:
        >>> import gradpolicy as gp
        >>> smooth = gp.gradient_of(lambda x: x - torch.sin(2 * torch.pi * x) / (2 * torch.pi))
        >>> x = torch.tensor([0.0, 0.5], requires_grad=True)
        >>> with gp.gradient_override({"floor": smooth}):
        ...     torch.floor(x).sum().backward()
        >>> x.grad
        tensor([0., 2.])
    """
    if isinstance(function, str):
        function = import_by_name(function)
    if not callable(function):
        raise PolicyError(f"gradient_of: expected a function of tensors or its path, got {shown(function)}")
    name = getattr(function, "__name__", type(function).__name__)
    return Rule(
        f"gradient of {name}", Derivative(function, f"function {name!r}"), parameters, reads=("inputs",)
    )
