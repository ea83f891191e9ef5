"""A rule: its schedule, the row of its use, and its checked gradients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_number
from gradpolicy.errors import PolicyError
from gradpolicy.flow.containers import map_tensors
from gradpolicy.flow.locations import RulePlacement
from gradpolicy.flow.policy_report import Outcome, ReportRow
from gradpolicy.flow.tracing import is_compiling, is_traced, without_modes
from gradpolicy.rules.registry import Call, GradientFilter, Rule, RuleFunction, keyword_names
from gradpolicy.rules.routing import broadcasts, first_index, is_differentiable
from gradpolicy.schedules import value_at


class RuleState:
    """The rule of a policy, or of an operation of a ``gradient_override``, with its schedule.

    Args:
        name: The name of the policy, or of the operation.
        rule: The rule. Callables among its parameters are schedules.
        policy: The policy. If None, the rule is always active.
        row: The row of the report in which the rule's use is counted; by default a new one.
    """

    def __init__(
        self, name: str, rule: Rule, policy: RulePlacement | None = None, row: ReportRow | None = None
    ) -> None:
        self.name = name
        # The beginning of messages; empty for an operation of a block.
        self.prefix = "" if policy is None else f"policy {name!r}: "
        self.policy = policy = RulePlacement() if policy is None else policy
        # True if the rule filters the incoming gradient and keeps the operation's own backward.
        gradient_filter = None if policy.at == "through" else rule.gradient_filter
        self.filters = gradient_filter is not None
        if gradient_filter is not None:
            rule = replace(rule, function=partial(_filtered, gradient_filter), reads=(), own=False)
        self.active = True
        self.schedules = {key: value for key, value in rule.parameters.items() if callable(value)}
        # Scheduled parameters are tensors, so that compiled code reads their current values.
        numbers = {key: _number(self._scheduled(key, 0)) for key in self.schedules}
        self.rule = replace(rule, parameters={**rule.parameters, **numbers})
        # The scheduled and learned parameters, whose values may change between forward and backward.
        self.changing = tuple(
            key
            for key, value in self.rule.parameters.items()
            if isinstance(value, Tensor) and (value.requires_grad or value.dim() == 0)
        )
        self.loss_scale: Tensor | None = None
        self.row = ReportRow(name) if row is None else row
        # The number of calls of each operation in the current forward, for policies with `calls=`; None
        # outside of the forward.
        self.call_counts: dict[str, int] | None = None
        # Set at every run of compiled code, unlike counts of the row: blocks share compiled code, and each
        # needs to know if its rule acted there. A set or dict of names would make the compiler recompile.
        self.acted_in_compiled_code = False

    def note(self, location: str, outcome: Outcome) -> None:
        """Count an outcome at a location."""
        is_traced = is_compiling()
        self.row.note(location, outcome, is_traced)
        if is_traced and not self.prefix and outcome is Outcome.ACTED:
            self.acted_in_compiled_code = True

    def count_call(self, operation: str) -> bool:
        """Count a call of an operation, and return True if the rule, which counts calls, applies to it."""
        if self.call_counts is None:
            return False
        number = self.call_counts.get(operation, 0)
        self.call_counts[operation] = number + 1
        return number in self.policy.calls

    def acts_at(self, location: str) -> bool:
        """Return True if the rule acts at a location in this call; otherwise record the reason."""
        if self.active and torch.is_grad_enabled():
            return True
        self.note(location, Outcome.WITHOUT_GRADIENT if self.active else Outcome.OFF)
        return False

    def update(self, phase: str, step: int, epoch: int) -> None:
        """Switch the rule on or off for a step, and set its scheduled parameters."""
        self.active = self.policy.when.active(phase=phase, step=step, epoch=epoch)
        count = self.policy.when.count(step, epoch)
        for key in self.schedules:
            self.rule.parameters[key].fill_(self._scheduled(key, count))

    def _scheduled(self, key: str, count: int) -> float:
        """Return the value of a scheduled parameter.

        Raises:
            PolicyError: If it is no finite number.
        """
        value = value_at(self.schedules[key], count)
        return check_number(f"{self.prefix}{key} at {count}", value, least=-math.inf)

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Set the loss scale (fp16), which rules do not see.

        A rule with a parameter ``loss_scale`` gets it; for any other that depends on the scale, gradients are
        divided by it.
        """
        if self.loss_scale is not None:
            self.loss_scale.copy_(torch.as_tensor(scale))
        elif self.policy.rule.depends_on_scale and (isinstance(scale, Tensor) or scale != 1.0):
            self.loss_scale = _number(float(scale))
            if "loss_scale" in (keyword_names(self.policy.rule.function) or ()):
                self.rule.parameters["loss_scale"] = self.loss_scale  # type: ignore[index]


@dataclass(eq=False)
class BoundRule:
    """A rule at one location. Its results are checked.

    Args:
        state: The rule.
        location: The location, for messages: ``"operation 'relu'"``.
        sums_broadcast: True if gradients in the output's shape are summed to the shape of broadcast inputs.
        current: Values of the rule's parameters that replace those of the state.
        outputs: For rules with ``own``, the operation's output and its version, once they are known.
    """

    state: RuleState
    location: str
    sums_broadcast: bool = False
    current: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence = ()

    def __post_init__(self) -> None:
        self.rule = self.state.rule
        # The arguments whose values the rule reads: "inputs", "output", both or neither.
        self.reads = self.rule.reads or ()
        if self.rule.takes_call:
            self.current = {"call": Call(self.location), **self.current}

    def with_current_numbers(self) -> "BoundRule":
        """Return the rule with the current values of scheduled and learned parameters."""
        if not self.state.changing:
            return self
        numbers = {key: self.rule.parameters[key].clone() for key in self.state.changing}
        return replace(self, current={**self.current, **numbers})

    def for_call(
        self, operation: str, arguments: Mapping[str, Any], derivative: RuleFunction | None = None
    ) -> "BoundRule":
        """Return the rule with a call as its keyword argument ``call``, if it has one."""
        if not self.rule.takes_call:
            return self
        return replace(self, current={**self.current, "call": Call(operation, arguments, derivative)})

    def in_module(self, module: str | None) -> "BoundRule":
        """Return the rule with a location that includes the name of the module in whose forward it acts."""
        if module is None:
            return self
        where = f"module {module!r}" if module else "the model"
        return replace(self, location=f"{self.location} in {where}")

    def result(self) -> Tensor | None:
        """Return the output of the operation whose own gradients the rule modifies, if it reads that.

        Raises:
            PolicyError: If it was changed in place, or second derivatives are recorded.
        """
        if not self.outputs:
            return None
        output, version = self.outputs
        if output._version != version or torch.is_grad_enabled():
            raise self.error(
                "reads the operation's output, which must not be changed in place and has no second "
                "derivatives (create_graph=True); compute what it needs from the inputs"
            )
        return output

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
        if self.rule.own and self.rule.each:
            gradients: Sequence = [
                None if one is None else self._returned(one, (tensor,), tensor, (True,))[0]
                for one, tensor in zip(grad, inputs, strict=True)
            ]
        else:
            gradients = self._returned(grad, inputs, output, wanted)
        checked = [
            self._checked(number, gradient, tensor, output) if needed else None
            for number, (gradient, tensor, needed) in enumerate(zip(gradients, inputs, wanted, strict=True))
        ]
        if not is_compiling() and self.state.row.norms is not None:
            self.state.row.norms.measure(grad, checked)
        return checked

    def _returned(
        self, grad: Any, inputs: tuple[Tensor, ...], output: Any, wanted: Sequence[bool]
    ) -> Sequence:
        """Return the result of the rule's function, one gradient per input.

        Raises:
            PolicyError: If it returns the wrong number of gradients, or one gradient where several inputs
                require one.
        """
        scale = None if "loss_scale" in self.rule.parameters else self.state.loss_scale
        if scale is None:
            returned = self._call(grad, inputs, output)
        else:
            # Small gradients vanish in fp16 without their scale.
            grad, *others = map_tensors(_with_range, (grad, inputs, output), is_differentiable)
            grad = map_tensors(lambda each: (each / scale).to(each.dtype), grad)
            returned = map_tensors(lambda each: each * scale, self._call(grad, *others), is_differentiable)
        if isinstance(returned, tuple | list):
            if len(returned) != len(inputs):
                raise self.error(
                    f"returned {len(returned)} gradients {_shapes(returned)} "
                    f"for {len(inputs)} inputs {_shapes(inputs)}",
                )
            return returned
        first = list(wanted).index(True) if self.rule.own else first_index(inputs)
        if any(wanted[number] for number in range(len(inputs)) if number != first):
            raise self.error(
                f"returned one gradient ({_kind(returned)}) for {len(inputs)} inputs {_shapes(inputs)}, of "
                "which others need one too; return a tuple with one for each, None where there is none, "
                "change the own gradients of an operation instead (own=True), or name the input that the "
                "gradient is for (argument=…)"
            )
        return [returned if number == first else None for number in range(len(inputs))]

    def _call(self, grad: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        """Call the rule's function, without overrides of the operations in it.

        Raises:
            PolicyError: If the function raises an exception; the message has the location and the shapes.
        """
        # Where no value is current, that of the state, which changes.
        parameters = {**self.rule.parameters, **self.current}
        with without_modes():
            if is_traced():
                return self.rule.function(grad, inputs, output, **parameters)
            try:
                return self.rule.function(grad, inputs, output, **parameters)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                given = f"a gradient of shape {_shapes(grad)}, inputs of shapes {_shapes(inputs)}"
                given += "" if output is None else f", an output of shape {_shapes(output)}"
                kind = "" if isinstance(error, PolicyError) else f"{type(error).__name__}: "
                reason = " ".join(str(error).split()).removeprefix(f"rule {self.rule.name!r}: ")
                raise self.error(f"failed with {given}: {kind}{reason}") from error

    def _checked(self, number: int, gradient: Any, tensor: Tensor, output: Any) -> Tensor | None:
        if gradient is None:
            return None
        if not is_differentiable(gradient):
            found = f"a tensor in {gradient.dtype}" if isinstance(gradient, Tensor) else _kind(gradient)
            raise self.error(f"returned {found} as gradient {number}; expected a floating-point tensor")
        if gradient.is_complex() and not tensor.is_complex():
            raise self.error(f"returned a complex gradient {number} for an input in {tensor.dtype}")
        if gradient.shape != tensor.shape:
            is_like_output = isinstance(output, Tensor) and gradient.shape == output.shape
            if not (self.sums_broadcast and is_like_output and broadcasts(tensor.shape, gradient.shape)):
                is_across = self.state.policy.at == "through"
                hint = "; name outputs (output=…) and an input (argument=…) of one shape" if is_across else ""
                raise self.error(
                    f"returned gradient {number} of shape {_shapes(gradient)} for an input of shape "
                    f"{_shapes(tensor)}{hint}"
                )
            gradient = gradient.sum_to_size(tensor.shape)
        return gradient.to(tensor.dtype)

    def error(self, text: str) -> PolicyError:
        """Return an error that names the policy, the rule and the location."""
        return PolicyError(f"{self.state.prefix}rule {self.rule.name!r} at {self.location}: {text}")


def _filtered(
    gradient_filter: GradientFilter, grad: Tensor, inputs: Any, output: Any, **parameters: Any
) -> Tensor:
    """Filter a gradient: the function of a rule that keeps the operation's own backward."""
    filtered = gradient_filter(grad, **parameters)
    if filtered is None:
        raise PolicyError("returned None; a gradient filter returns a tensor")
    return filtered


def _kind(value: Any) -> str:
    return f"a tensor of shape {_shapes(value)}" if isinstance(value, Tensor) else type(value).__name__


def _shapes(value: Any) -> str:
    """Return the shape of a tensor, or the shapes of a tuple of tensors, for messages."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    return f"({', '.join(_shapes(item) if isinstance(item, Tensor) else str(item) for item in value)})"


def _with_range(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64, device="cpu")
