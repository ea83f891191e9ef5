"""A rule at one location, which computes and checks gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.flow.rule_state import RuleState
from gradpolicy.flow.tracing import is_traced
from gradpolicy.rules.registry import Call
from gradpolicy.rules.routing import broadcasts, first_index, is_differentiable

# A local name saves the attribute lookup at every call.
_without_modes = torch._C.DisableTorchFunction


class BoundRule:
    """A rule at one location. Its results are checked.

    Args:
        state: The rule.
        location: The location, for messages: ``"operation 'relu'"``.
        sums_broadcast: True if gradients in the output's shape are summed to the shape of broadcast inputs.
        parameters: The rule's parameters; by default those of the state.
    """

    def __init__(
        self,
        state: RuleState,
        location: str,
        *,
        sums_broadcast: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self.state = state
        self.rule = state.rule
        self.location = location
        self.filter = state.rule.gradient_filter
        self.sums_broadcast = sums_broadcast
        self.parameters = state.rule.parameters if parameters is None else parameters
        self.takes_call = self.rule.takes_call and not state.filters
        if self.takes_call and "call" not in self.parameters:
            self.parameters = {**self.parameters, "call": Call(location)}

    @property
    def reads(self) -> tuple[str, ...]:
        """The arguments whose values the rule reads: ``"inputs"``, ``"output"``, both or neither."""
        return () if self.state.filters else self.rule.reads or ()

    def with_current_numbers(self) -> "BoundRule":
        """Return the rule with the current values of scheduled and learned parameters."""
        if not self.state.changing:
            return self
        return self._with({key: self.parameters[key].clone() for key in self.state.changing})

    def for_call(self, call: Call) -> "BoundRule":
        """Return the rule with a call as its keyword argument ``call``, if it has one."""
        return self._with({"call": call}) if self.takes_call else self

    def in_module(self, module: str | None) -> "BoundRule":
        """Return the rule with a location that includes the name of the module in whose forward it acts."""
        if module is None:
            return self
        return self._with({}, f"{self.location} in {f'module {module!r}' if module else 'the model'}")

    def _with(self, parameters: dict[str, Any], location: str = "") -> "BoundRule":
        merged = {**self.parameters, **parameters} if parameters else self.parameters
        location = location or self.location
        return BoundRule(self.state, location, sums_broadcast=self.sums_broadcast, parameters=merged)

    def gradients(
        self, grad: Any, inputs: tuple[Tensor, ...], output: Any, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the rule's gradients, one per input, checked and in each input's dtype.

        Args:
            grad: The gradient of the output; a tuple if the output is one. For rules with ``own``, the
                operation's own gradients, one per input.
            inputs: The inputs.
            output: The output.
            wanted: For each input, True if it requires a gradient.

        Raises:
            PolicyError: If the rule fails, or returns the wrong number, shape or type of gradients.
        """
        gradients: Sequence
        if self.state.filters:
            gradients = [self._call(cast(Callable, self.filter), grad)]
            if gradients[0] is None:
                raise self._error("returned None; a gradient filter returns a tensor")
        elif self.rule.own and self.rule.each:
            gradients = [
                None if one is None else self._returned(one, (tensor,), tensor, (True,))[0]
                for one, tensor in zip(grad, inputs, strict=True)
            ]
        else:
            gradients = self._returned(grad, inputs, output, wanted)
        checked = [
            self._checked(number, gradient, tensor, output) if needed else None
            for number, (gradient, tensor, needed) in enumerate(zip(gradients, inputs, wanted, strict=True))
        ]
        self.state.measure(grad, checked)
        return checked

    def _call(self, function: Callable, *arguments: Any) -> Any:
        """Call the rule's function, without overrides of the operations in it.

        Raises:
            PolicyError: If the function raises an exception; the message has the location and the shapes.
        """
        with _without_modes():
            if is_traced():
                return function(*arguments, **self.parameters)
            try:
                return function(*arguments, **self.parameters)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise self._failure(error, *arguments) from error

    def _returned(
        self, grad: Any, inputs: tuple[Tensor, ...], output: Any, wanted: Sequence[bool]
    ) -> Sequence:
        """Return the result of the rule's function, one gradient per input.

        Raises:
            PolicyError: If it returns the wrong number of gradients, or one gradient where several inputs
                require one.
        """
        returned = self._call(self.rule.function, grad, inputs, output)
        if isinstance(returned, tuple | list):
            if len(returned) != len(inputs):
                raise self._error(
                    f"returned {len(returned)} gradients {_shapes(returned)} "
                    f"for {len(inputs)} inputs {_shapes(inputs)}",
                )
            return returned
        first = list(wanted).index(True) if self.rule.own else first_index(inputs)
        if any(wanted[number] for number in range(len(inputs)) if number != first):
            raise self._error(self._of_several_inputs(returned, inputs))
        return [returned if number == first else None for number in range(len(inputs))]

    def _of_several_inputs(self, returned: Any, inputs: tuple[Tensor, ...]) -> str:
        """Return the message for a single gradient where several inputs require one."""
        text = (
            f"returned one gradient ({_kind(returned)}) for {len(inputs)} inputs {_shapes(inputs)} of which "
            "others need one too; use a function that returns a tuple with one for each, None where there is "
            "none"
        )
        if self.state.policy is not None:
            text += ", or name the input that the gradient is for (argument=…)"
        if self.rule.each and self.sums_broadcast:
            text += "; or change the operation's own gradients, for every input (own=True)"
        return text

    def _checked(self, number: int, gradient: Any, tensor: Tensor, output: Any) -> Tensor | None:
        if gradient is None:
            return None
        if isinstance(gradient, Tensor) and gradient.dtype == tensor.dtype and gradient.shape == tensor.shape:
            return gradient
        wrong = ""
        if not isinstance(gradient, Tensor):
            wrong = f"{_kind(gradient)} as gradient {number}; it must be a tensor"
        elif not is_differentiable(gradient):
            wrong = f"gradient {number} in {gradient.dtype}; it must be floating-point"
        elif gradient.is_complex() and not tensor.is_complex():
            wrong = f"a complex gradient {number} for an input in {tensor.dtype}"
        elif gradient.shape != tensor.shape:
            if self.sums_broadcast and _was_broadcast(tensor, output, gradient):
                gradient = gradient.sum_to_size(tensor.shape)
            else:
                wrong = (
                    f"gradient {number} of shape {_shapes(gradient)} for an input of shape {_shapes(tensor)}"
                )
        if wrong:
            raise self._error(f"returned {wrong}")
        return gradient if gradient.dtype == tensor.dtype else gradient.to(tensor.dtype)

    def _failure(self, error: Exception, grad: Any, inputs: Any = (), output: Any = None) -> PolicyError:
        given = [f"a gradient of shape {_shapes(grad)}"]
        if inputs:
            given.append(f"inputs of shapes {_shapes(inputs)}")
        if output is not None:
            given.append(f"an output of shape {_shapes(output)}")
        reason = " ".join(str(error).split()).removeprefix(f"rule {self.rule.name!r}: ")
        kind = "" if isinstance(error, PolicyError) else f"{type(error).__name__}: "
        return self._error(f"failed with {', '.join(given)}: {kind}{reason}")

    def _error(self, text: str) -> PolicyError:
        policy = f"policy {self.state.name!r}: " if self.state.policy is not None else ""
        return PolicyError(f"{policy}rule {self.rule.name!r} at {self.location}: {text}")


def _was_broadcast(tensor: Tensor, output: Any, gradient: Tensor) -> bool:
    if not isinstance(output, Tensor) or gradient.shape != output.shape:
        return False
    return broadcasts(tensor.shape, output.shape)


def _kind(value: Any) -> str:
    return f"a tensor of shape {_shapes(value)}" if isinstance(value, Tensor) else type(value).__name__


def _shapes(value: Any) -> str:
    """Return the shape of a tensor, or the shapes of a tuple of tensors, for messages."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    return f"({', '.join(_shapes(item) if isinstance(item, Tensor) else str(item) for item in value)})"
