"""The rule of a policy with its schedule, and counted calls."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.flow.locations import RulePlacement
from gradpolicy.flow.seen import Seen
from gradpolicy.flow.tracing import is_compiling
from gradpolicy.rules.registry import Rule, keyword_names
from gradpolicy.when import When


class RuleState:
    """The rule of a policy, or of an operation of a ``gradient_override``, with its schedule.

    Args:
        name: The name of the policy, or of the operation.
        rule: The rule. Callables among its parameters are schedules.
        policy: The policy. If None, the rule is always active.
        has_own_gradient: True if the operation has a gradient of its own, which the rule's filter can change.
            Otherwise the rule's function returns the gradient.
    """

    def __init__(
        self,
        name: str,
        rule: Rule,
        policy: RulePlacement | None = None,
        *,
        has_own_gradient: bool = True,
    ) -> None:
        self.name = name
        self.policy = policy
        self.when = policy.when if policy is not None else When()
        self.detaches = policy is not None and policy.detaches
        # The indices of the calls to which the rule applies; empty means all calls.
        self.calls = policy.calls if policy is not None else ()
        # The only argument of an operation to which the rule applies; None means all arguments.
        self.argument = policy.argument if policy is not None and policy.ops else None
        # True if the rule filters the incoming gradient and keeps the operation's own backward.
        has_own_gradient = has_own_gradient and (policy is None or policy.at != "through")
        self.filters = has_own_gradient and rule.gradient_filter is not None
        self.active = True
        self.schedules = {key: value for key, value in rule.parameters.items() if callable(value)}
        # Scheduled parameters are tensors, so that compiled code reads their current values.
        numbers = {key: _number(schedule(0)) for key, schedule in self.schedules.items()}
        self.rule = replace(rule, parameters={**rule.parameters, **numbers})
        # The scheduled and learned parameters, whose values may change between forward and backward.
        self.changing = tuple(
            key
            for key, value in self.rule.parameters.items()
            if isinstance(value, Tensor) and (value.requires_grad or value.dim() == 0)
        )
        self.seen = Seen()
        # Set at every run of compiled code, unlike what is in `seen`: blocks share compiled code, and each
        # needs to know if its rule acted there. A set or dict of names would make the compiler recompile.
        self.acted_in_compiled_code = False

    def note(self, kind: str, item: Any, warning: str = "") -> None:
        """Add an item to a field of the record, and give a warning if it is new there."""
        is_traced = is_compiling()
        self.seen.add(kind, item, warning, is_traced)
        if is_traced and self.policy is None and kind == "matched":
            self.acted_in_compiled_code = True

    def note_forward(self) -> None:
        """Record that a forward pass with gradients runs."""
        self.note("forward", "on" if self.active else "off")

    def note_lost(self, operation: str, function: str, is_index: bool) -> None:
        """Warn once that a function lost the gradient of an operation's discrete result."""
        policy = f"policy {self.name!r}: " if self.policy is not None else ""
        self.note("lost", (operation, function), policy + _lost_message(operation, function, is_index))

    def note_opaque(self, call: str, reason: str) -> None:
        """Record, and warn once, that the rule cannot act on operations within a call."""
        self.note("opaque", (call, reason), f"policy {self.name!r} cannot see into {call}: {reason}")

    def measure(self, before: Any, after: Iterable[Tensor | None]) -> None:
        """Measure gradients before and after the rule, in eager mode only."""
        if not is_compiling() and self.seen.norms is not None:
            self.seen.norms.measure(before, after)

    def count_call(self, operation: str) -> bool:
        """Count a call of an operation, and return True if the rule applies to it."""
        if not self.calls:
            return True
        number = self.seen.calls.get(operation)
        if number is None:
            return False
        self.seen.calls[operation] = number + 1
        return number in self.calls

    def acts_at(self, place: str) -> bool:
        """Return True if the rule acts at a place of a module in this call; otherwise record the reason."""
        if self.active and torch.is_grad_enabled():
            return True
        self.note("without_gradient" if self.active else "off", place)
        return False

    def update(self, phase: str, step: int, epoch: int) -> None:
        """Switch the rule on or off for a step, and set its scheduled parameters."""
        self.active = self.when.active(phase=phase, step=step, epoch=epoch)
        count = self.when.count(step, epoch)
        for key, schedule in self.schedules.items():
            self.rule.parameters[key].fill_(float(schedule(count)))

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Set the loss scale of a rule with absolute thresholds."""
        if "loss_scale" not in (keyword_names(self.rule.function) or ()):
            return
        current = self.rule.parameters.get("loss_scale")
        if isinstance(current, Tensor):
            current.copy_(torch.as_tensor(scale))
        elif isinstance(scale, Tensor) or scale != 1.0:
            self.rule.parameters["loss_scale"] = _number(float(scale))  # type: ignore[index]


class CallScope:
    """A forward within which calls are counted, for policies with ``calls=``.

    If such forwards are nested, a call counts for the innermost one.

    Args:
        where: The forward, for messages.
        counted: The rules, each with the name of the operation whose calls are counted.
    """

    def __init__(self, where: str, counted: Iterable[tuple[RuleState, str]]) -> None:
        self.where = where
        self.counted = tuple(counted)

    def run(self, forward: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """Run the forward, counting from 0.

        Raises:
            PolicyError: If an operation ran less often than ``calls=`` requires.
        """
        outer = [state.seen.calls.get(operation) for state, operation in self.counted]
        for state, operation in self.counted:
            state.seen.calls[operation] = 0
        try:
            result = forward(args, kwargs)
            for state, operation in self.counted:
                count = state.seen.calls[operation] or 0
                if state.active and count <= max(state.calls):
                    times = "once" if count == 1 else f"{count} times"
                    raise PolicyError(
                        f"policy {state.name!r}: operation {operation!r} ran {times} in {self.where}, so "
                        f"there is no call {max(state.calls)} (calls= counts from 0)"
                    )
            return result
        finally:
            for (state, operation), before in zip(self.counted, outer, strict=True):
                state.seen.calls[operation] = before


def _lost_message(operation: str, function: str, is_index: bool) -> str:
    if is_index:
        return (
            f"an index from operation {operation!r} became numbers in {function}, and an index has no "
            "gradient: use the values that the operation gives, F.one_hot(x.argmax(-1), n) with a rule for "
            "'argmax', or detach the index (.detach()) if no gradient is meant"
        )
    return (
        f"the result of operation {operation!r} went through {function}, which cannot carry the rule's "
        "gradient; cast it to floating point before (.float()), put the rule on all of it "
        "(gradpolicy.apply), or detach it if no gradient is meant"
    )


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64, device="cpu")
