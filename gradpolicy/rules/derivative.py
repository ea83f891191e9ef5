"""The derivative of another function at the same inputs, as a rule."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.operator_schemas import get_signature_for_torch_op

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
        signatures: The signatures of f, one an overload. If there are none, f gets all inputs.
        settings: Names of parameters of f whose values, such as ``dim``, are those of the operation's call.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        name: str,
        signatures: Iterable[inspect.Signature],
        settings: Collection[str] = (),
    ) -> None:
        self.function, self.name, self.settings = function, name, settings
        # Compiled code cannot read signatures.
        self.tensor_names = tuple(map(_names_of_tensors, signatures))

    def __call__(
        self, grad: Tensor, inputs: Inputs, output: Tensor, *, call: Call | None = None, **parameters: Any
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, for these keyword arguments of f.

        Raises:
            PolicyError: If f takes none of the inputs, or its value has another shape than ``grad``.
        """
        arguments = {} if call is None else call.arguments
        for name in self.settings:
            if name in arguments and _is_setting(arguments[name]):
                parameters[name] = arguments[name]
        function = functools.partial(self.function, **parameters) if parameters else self.function
        first = arguments.get("input")
        if self.settings and _is_setting(first) and self._count(parameters, len(inputs) + 1) > len(inputs):
            function = functools.partial(function, grad.new_tensor(first))
        given = inputs[: self._count(parameters, len(inputs))]
        if not given:
            raise PolicyError(f"{self.name} takes none of the inputs {[tuple(one.shape) for one in inputs]}")
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

    def _count(self, parameters: Iterable[str], available: int) -> int:
        """Return how many of the available tensors f takes beside these keyword arguments."""
        counts = [0 if self.tensor_names else available]
        for names in self.tensor_names:
            given = [place for place, name in enumerate(names) if name in parameters]
            free = names[: given[0]] if given else names
            counts.append(available if "*" in free else len(free))
        return min(available, max(counts))


def _names_of_tensors(signature: inspect.Signature) -> tuple[str, ...]:
    """Return the names of the first parameters, up to one that takes no tensor; ``"*"`` for ``*args``.

    Parameters whose default is neither None nor a tensor, or whose annotation is a number or a string, take
    none.
    """
    names = []
    for parameter in signature.parameters.values():
        annotation, default = str(parameter.annotation), parameter.default
        by_default = not (default is None or default is parameter.empty or isinstance(default, Tensor))
        by_annotation = "Tensor" not in annotation and _SETTINGS.search(annotation) is not None
        if by_default or by_annotation or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            break
        names.append("*" if parameter.kind is parameter.VAR_POSITIONAL else parameter.name)
    return tuple(names)


_SETTINGS = re.compile(r"\b(bool|int|float|complex|str|dtype|Number)\b")


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
            the dotted path to it. If its signature has fewer tensors than the operation has inputs, it gets
            the first. A parameter with a number as its default or annotation is no tensor.
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
    derivative = Derivative(function, f"function {name!r}", _signatures_of(function))
    return Rule(f"gradient of {name}", derivative, parameters, reads=("inputs",))


def _signatures_of(function: Callable[..., Tensor]) -> Iterable[inspect.Signature]:
    try:
        return [inspect.signature(function.forward if isinstance(function, nn.Module) else function)]
    except (TypeError, ValueError):
        # A function of torch that is not written in Python, or one without a signature.
        return get_signature_for_torch_op(function) or ()
