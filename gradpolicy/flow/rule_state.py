"""The rule of one policy and its clock, and a record of what it did."""

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, warn_user
from gradpolicy.flow.locations import RulePlacement
from gradpolicy.flow.tracing import is_compiling, runs_while_tracing
from gradpolicy.rules.registry import Rule, keyword_names
from gradpolicy.when import When


class GradientNorms:
    """Sums of squared gradient norms. The tensors stay on their device until they are read.

    Attributes:
        on: True if it measures.
        zeros: The number of entries of passed gradients that are 0; None if none passed.
        entries: The number of entries of these gradients.
    """

    def __init__(self) -> None:
        self.on = False
        self.clear()

    def clear(self) -> None:
        """Clear the measurements."""
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        self.zeros: Tensor | None = None
        self.entries = 0

    def measure(self, before: Any, after: Iterable[Tensor | None]) -> None:
        """Add a gradient, or a tuple of them, before and after the rule."""
        with torch.no_grad():
            passed = [tensor for tensor in after if tensor is not None]
            self._before = _add_squares(self._before, before if isinstance(before, tuple) else (before,))
            self._after = _add_squares(self._after, passed)
            for tensor in passed:
                zeros = tensor.numel() - tensor.count_nonzero()
                self.zeros = zeros if self.zeros is None else self.zeros + zeros
                self.entries += tensor.numel()

    def read(self) -> tuple[Tensor, Tensor] | None:
        """Return the norms over everything measured since the last clearing; None if that is nothing."""
        if self._before is None or self._after is None:
            return None
        return self._before.sqrt(), self._after.sqrt()


class FlowObserver(Protocol):
    """An observer of policies; see :meth:`gradpolicy.flow.install.Installed.observe`."""

    def cut(self, policy: str, location: str, results: Any) -> None:
        """Handle results that the policy detached from the graph."""

    def passed(self, policy: str, gradients: Iterable[Tensor | None]) -> None:
        """Handle gradients that the policy passed."""


@dataclass(eq=False)
class Seen:
    """The record of what happened where a rule acts: the report, the warnings and the plan read it.

    Args:
        matched: How often the rule was put on each operation, or passed at each place.
        ran: The operations that ran there without the rule.
        without_gradient: Operations that ran where no gradient is recorded, and places that none crossed.
        off: Places that were passed while the rule was off.
        discrete: Operations with bool or integer results, which must become floating-point to count.
        lost: Operations whose results went into functions that cannot carry the gradient, with these.
        opaque: Calls within which the rule cannot act, each with the reason.
        taken: Operations that an inner override or policy took.
        forward: ``"on"`` and ``"off"``, if a forward pass ran while the rule was that; ``"compiled"``.
        compiled: True if some counts are of compiled code: one each time it is traced.
    """

    matched: dict[str, int] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    without_gradient: set[str] = field(default_factory=set)
    off: set[str] = field(default_factory=set)
    discrete: set[str] = field(default_factory=set)
    lost: set[tuple[str, str]] = field(default_factory=set)
    opaque: set[tuple[str, str]] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    forward: set[str] = field(default_factory=set)
    compiled: bool = False

    def add(self, kind: str, what: Any) -> bool:
        """Add to one of the counts or sets; return True if it is new there."""
        if kind == "matched":
            self.matched[what] = self.matched.get(what, 0) + 1
            return self.matched[what] == 1
        found: set = getattr(self, kind)
        is_new = what not in found
        found.add(what)
        return is_new


# While torch.compile traces, the record of a policy is found by its key. The key is a string, since the
# compiler would turn a number that changes into a symbol.
_RECORDS: "weakref.WeakValueDictionary[str, Seen]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
# What compiled code noted of the rules of gradient_override: pairs of a rule's key and a field of Seen. Code
# that is compiled already notes nothing in a later block.
_NOTED_OF_BLOCKS: set[tuple[str, str]] = set()


class RuleState:
    """The rule of one policy, or of one operation of a ``gradient_override``, and its clock.

    Args:
        name: The name of the policy, or of the operation.
        rule: The rule. A callable among its parameters is a schedule.
        policy: The policy. Without one the rule always acts, and nothing of it is counted in compiled code,
            so that the compiler sees no difference between blocks and need not compile anew for each.
        has_own_gradient: True if the place has a gradient of its own, which a rule's filter or its
            ``own`` can change; otherwise the rule's function makes it.
    """

    # How often any rule has been used so far, but in compiled code.
    uses = 0

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
        # The numbers of the calls that it is for; none means all. The calls of each operation or module so
        # far, within the forward that counts them.
        self.calls = policy.calls if policy is not None else ()
        self.counts: dict[str, int | None] = {}
        # The one argument of each operation that it is for; None means all.
        self.argument = policy.argument if policy is not None and policy.ops else None
        # True if the rule's filter changes the gradient that comes in.
        has_own_gradient = has_own_gradient and (policy is None or policy.at != "through")
        self.filters = has_own_gradient and rule.gradient_filter is not None
        self.active = True
        self.schedules = {key: value for key, value in rule.parameters.items() if callable(value)}
        # A scheduled number lives in a tensor, so that compiled code reads it anew at each step.
        numbers = {key: _number(schedule(0)) for key, schedule in self.schedules.items()}
        self.rule = replace(rule, parameters={**rule.parameters, **numbers})
        # The numbers that may be others when the backward pass runs: scheduled and learnt ones.
        self.changing = tuple(
            key
            for key, value in self.rule.parameters.items()
            if isinstance(value, Tensor) and (value.requires_grad or value.dim() == 0)
        )
        self.norms = GradientNorms()
        self.observer: FlowObserver | None = None
        self.seen = Seen()
        # Of a gradient_override, of which compiled code counts nothing.
        self.acted_in_compiled_code = False
        self._take_key()

    def note(self, kind: str, what: Any, warning: str = "") -> None:
        """Add to one of the counts or sets of :class:`Seen`, and give a warning if it is new there."""
        if is_compiling():
            _note_while_tracing(self.key, kind, what, warning)
            if self.policy is None and kind == "matched":
                # Compiled code does this whenever it runs, and so tells each block.
                self.acted_in_compiled_code = True
            return
        if self.seen.add(kind, what) and warning:
            warn_user(warning)
        if kind == "matched":
            RuleState.uses += 1

    def note_forward(self) -> None:
        """Note that a forward pass with gradients runs."""
        if is_compiling():
            self.note("forward", "compiled")
        self.note("forward", "on" if self.active else "off")

    def note_lost(self, operation: str, function: str, is_index: bool) -> None:
        """Warn once that the result of an operation went into a function that cannot carry a gradient."""
        policy = f"policy {self.name!r}: " if self.policy is not None else ""
        self.note("lost", (operation, function), policy + _lost_message(operation, function, is_index))

    def note_opaque(self, call: str, reason: str) -> None:
        """Note, and warn once, that the rule cannot act on operations inside a call."""
        self.note("opaque", (call, reason), f"policy {self.name!r} cannot see into {call}: {reason}")

    def measure(self, before: Any, after: Iterable[Tensor | None]) -> None:
        """Measure gradients before and after the rule, and show them to the observer, if not compiled."""
        if self.norms.on and not is_compiling():
            self.norms.measure(before, after)
        if self.observer is not None and not is_compiling():
            self.observer.passed(self.name, after)

    def note_cut(self, location: str, results: Any) -> None:
        """Report to the observer that results were detached from the graph."""
        if not is_compiling() and self.observer is not None:
            self.observer.cut(self.name, location, results)

    def is_meant(self, operation_or_module: str) -> bool:
        """Count a call, within the forward that counts them; return True if the rule is for it."""
        if not self.calls:
            return True
        number = self.counts.get(operation_or_module)
        if number is None:
            return False
        self.counts[operation_or_module] = number + 1
        return number in self.calls

    def is_due(self, place: str, module: str) -> bool:
        """Return True if the rule is to act at a place of a module now, in this call of it.

        If it is not, that is noted, unless another call is meant.
        """
        is_meant = self.is_meant(f"module {module!r}")
        if not self.active:
            self.note("off", place)
        elif not torch.is_grad_enabled():
            self.note("without_gradient", place)
        else:
            return is_meant
        return False

    def update(self, phase: str, step: int, epoch: int) -> None:
        """Switch the rule on or off for a time, and set its scheduled numbers."""
        self.active = self.when.active(phase=phase, step=step, epoch=epoch)
        count = self.when.count(step, epoch)
        for key, schedule in self.schedules.items():
            self.rule.parameters[key].fill_(float(schedule(count)))

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Give a rule with absolute thresholds the factor on the loss."""
        if "loss_scale" not in (keyword_names(self.rule.function) or ()):
            return
        current = self.rule.parameters.get("loss_scale")
        if isinstance(current, Tensor):
            current.copy_(torch.as_tensor(scale))
        elif isinstance(scale, Tensor) or scale != 1.0:
            self.rule.parameters["loss_scale"] = _number(float(scale))  # type: ignore[index]

    def _take_key(self) -> None:
        self.key = f"{self.name}: {self.rule.name}"
        if self.policy is not None:
            self.key = f"policy {next(_NUMBERS)}"
            _RECORDS[self.key] = self.seen

    def __getstate__(self) -> dict:
        # The observer belongs to the original model.
        return {**self.__dict__, "observer": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._take_key()


class CallScope:
    """A forward within which calls are counted, for policies that name some of them (``calls=``).

    Where such forwards lie within each other, a call counts for the innermost one.

    Args:
        where: The forward, for messages.
        counted: The rules, each with the operation or module of which it counts the calls.
    """

    def __init__(self, where: str, counted: Iterable[tuple[RuleState, str]]) -> None:
        self.where = where
        self.counted = tuple(counted)

    def run(self, forward: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """Run the forward, and count anew.

        Raises:
            PolicyError: If an operation, or a module that ran, ran less often than a policy says.
        """
        outer = [state.counts.get(what) for state, what in self.counted]
        for state, what in self.counted:
            state.counts[what] = 0
        try:
            result = forward(args, kwargs)
            for state, what in self.counted:
                self._check(state, what, state.counts[what] or 0)
            return result
        finally:
            for (state, what), count in zip(self.counted, outer, strict=True):
                state.counts[what] = count

    def _check(self, state: RuleState, what: str, count: int) -> None:
        if state.active and count <= max(state.calls) and (count or what.startswith("operation")):
            times = "once" if count == 1 else f"{count} times"
            raise PolicyError(
                f"policy {state.name!r}: {what} ran {times} in {self.where}, so there is no call "
                f"{max(state.calls)} (calls= counts from 0)"
            )


@runs_while_tracing
def _note_while_tracing(key: str, kind: str, what: Any, warning: str) -> None:
    if warning:
        warn_user(warning)
    record = _RECORDS.get(key)
    if record is None:
        _NOTED_OF_BLOCKS.add((key, kind))
    else:
        record.add(kind, what)
        record.compiled |= kind == "matched"


@runs_while_tracing
def warn_of_uncarried(subject: str, message: str, keys: tuple[str, ...]) -> None:
    """Warn at the end of a block in compiled code of results that never became floating-point there."""
    for key in keys:
        if (key, "discrete") in _NOTED_OF_BLOCKS and (key, "matched") not in _NOTED_OF_BLOCKS:
            warn_user(f"{subject}: the result of {key.partition(': ')[0]!r} {message}")


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


def rule_uses() -> int:
    """Return how often any rule has been used: two readings show if one was used between them."""
    return RuleState.uses


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def _add_squares(total: Tensor | None, tensors: Iterable[Tensor | None]) -> Tensor | None:
    for tensor in tensors:
        if tensor is not None:
            precise = torch.promote_types(tensor.dtype, torch.float32)
            square = torch.linalg.vector_norm(tensor, dtype=precise) ** 2
            total = square if total is None else total + square
    return total
