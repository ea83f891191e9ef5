"""The report of policies, and warnings of policies that did not act."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradpolicy.display import Displayed
from gradpolicy.errors import PolicyError, nearest, shortened, warn_user
from gradpolicy.flow.operations import operation_names
from gradpolicy.flow.seen import Seen

if TYPE_CHECKING:
    from rich.console import RenderableType

NO_GRADIENT = "ran only where no gradient is recorded (under torch.no_grad, or on tensors that need none)"
NEVER_FLOATING = (
    "never became floating-point there, so no gradient passed: cast it where the rule acts (.float()), or "
    "multiply it with floats"
)


@dataclass(frozen=True)
class ReportRow:
    """A policy or ``gradient_override`` in a :class:`Report`.

    Args:
        name: The policy's name.
        kind: The policy's class.
        where: The location in words.
        active: True if the policy is active.
        modules: The names of the matched modules, at or in which it acts.
        operations: The names of its operations.
        parameters: The names of the matched parameters.
        seen: The record of its use.
        any_of: True if one of the operations is enough, as for the default of ``StraightThrough``.
        places: Sides of modules that ran, and parameters, where the rule should have been applied. True for
            places that the policy names; of all others, which match a glob or class, one is enough.
        idle: The matched modules whose forward never ran.
    """

    name: str
    kind: str = ""
    where: str = ""
    active: bool = True
    modules: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    seen: Seen = field(default_factory=Seen)
    any_of: bool = False
    places: Mapping[str, bool] = field(default_factory=dict)
    idle: tuple[str, ...] = ()

    @property
    def matched(self) -> Mapping[str, int]:
        """The number of times that the rule was applied to each operation and place."""
        return dict(self.seen.matched)

    @property
    def opaque_calls(self) -> Mapping[str, str]:
        """Calls in which it cannot act on operations, each with the reason."""
        return dict(sorted(self.seen.opaque))

    @property
    def compiled(self) -> bool:
        """True if the counts include compiled code, which is counted once per compilation."""
        return "compiled" in self.seen.forward

    @property
    def operations_met(self) -> frozenset[str]:
        """The names of all operations that ran where the policy acts."""
        seen = self.seen
        return frozenset({*seen.ran, *seen.matched, *seen.without_gradient, *seen.discrete})

    @property
    def operations_matched(self) -> int:
        """The total number of times that the rule was applied."""
        return sum(self.seen.matched.values())

    @property
    def unmet(self) -> tuple[str, ...]:
        """The operations that should have run with the rule and did not."""
        excused = {*self.seen.matched, *self.seen.off}
        if "off" in self.seen.forward:
            # Operations that ran while the policy was inactive need not run while it is active.
            excused |= self.seen.ran
        missing = tuple(name for name in self.operations if name not in excused)
        return () if self.any_of and len(missing) < len(self.operations) else missing

    @property
    def untouched(self) -> tuple[str, ...]:
        """The places that a gradient should have reached and did not."""
        seen = self.seen
        acted = any(place in seen.matched for place in self.places)
        return tuple(
            place
            for place, is_named in self.places.items()
            if place not in seen.matched
            and place not in seen.off
            and (is_named or not acted)
            and not any(call.endswith(f" at {place}") for call, _ in seen.opaque)
        )

    def message(self, *, ignore_taken: bool = False, ignore_without_gradient: bool = False) -> str:
        """Return a message on operations and places where the rule was not applied; empty if there are none.

        Args:
            ignore_taken: Ignore operations on which an inner override or policy acted instead.
            ignore_without_gradient: Ignore operations and places that ran without a gradient.
        """
        ignored = {*(self.seen.taken if ignore_taken else ())}
        if ignore_without_gradient:
            ignored |= self.seen.without_gradient
        unmet = [name for name in self.unmet if name not in ignored]
        if self.any_of and len(unmet) < len(self.operations):
            unmet = []
        untouched = [place for place in self.untouched if place not in ignored]
        return "; ".join([*self._about_operations(unmet), *self._about_places(untouched)])

    def _about_places(self, untouched: list[str]) -> Iterator[str]:
        parameters = [place for place in untouched if place.startswith("parameter ")]
        crossed = [place for place in untouched if place not in parameters]
        if self.idle:
            names = [f"module {name!r}" if name else "the model" for name in self.idle]
            yield (
                f"{_listed(names)} never ran through its forward; another method of it, or a function "
                "of its weights, passes the policy by"
            )
        if crossed:
            yield (
                f"no gradient crosses {_listed(crossed)}: what passes there needs none (it is data, comes "
                "from frozen modules, or runs under torch.no_grad)"
            )
        if parameters:
            why = "it is frozen, not used, or no backward pass ran"
            yield f"no gradient came to {_listed(parameters)}: {why}"

    def _about_operations(self, unmet: list[str]) -> list[str]:
        seen = self.seen
        by_reason: dict[str, list[str]] = {}
        for name in unmet:
            reasons = ("taken", "discrete", "without_gradient")
            reason = next((each for each in reasons if name in getattr(seen, each)), "never")
            by_reason.setdefault(reason, []).append(name)
        parts = []
        if taken := by_reason.get("taken"):
            parts.append(f"{_operations(taken)} taken by another override or policy inside")
        if discrete := by_reason.get("discrete"):
            parts.append(f"the result of {_quoted(discrete)} {NEVER_FLOATING}")
        if without := by_reason.get("without_gradient"):
            parts.append(f"operation{'s' * (len(without) > 1)} {_quoted(without)} {NO_GRADIENT}")
        if (never := by_reason.get("never")) and not (self.any_of and parts):
            parts.append(f"{_operations(never)} never met; {self._instead(never)}")
        return parts

    def _instead(self, never: list[str]) -> str:
        """Return a hint for operations that never ran."""
        ran = self.operations_met
        if any(name in ran for name in never):
            return "it ran only with arguments that make it another operation"
        if self.seen.opaque:
            return f"it may run within {_quoted(self.opaque_calls)}, which cannot be seen into"
        named = sorted(ran & set(operation_names()))
        if not named:
            return "nothing ran there that a rule could be put on"
        return nearest(never[0], named).replace("valid names", "what ran there")


def check_operations(row: ReportRow, *, may_get_gradient: bool = False) -> str:
    """Check, after a step, that a policy's operations ran where it acts.

    Args:
        row: The policy's row.
        may_get_gradient: True if operations that ran where no gradient is recorded may get one later.

    Returns:
        A message on operations and places where the rule was not applied; empty if there are none.

    Raises:
        PolicyError: If none of the operations ran.
    """
    message, unmet = row.message(), set(row.unmet)
    may_come = may_get_gradient and unmet & row.seen.without_gradient
    if unmet and not may_come and unmet == set(row.operations):
        raise PolicyError(f"policy.{row.name}.ops: {message}")
    return message


def report_unmet(
    subject: str, row: ReportRow, *, strict: bool, ignore_without_gradient: bool = False
) -> None:
    """Warn at the end of a block of operations and places where the rule was not applied.

    Calls in which the rule cannot act, and lost gradients, gave warnings before; if strict, they raise here.
    Operations on which an inner override or policy acted instead are ignored.

    Args:
        subject: The name of the block, for the message.
        row: The row of the policy or ``gradient_override``.
        strict: Raise an error instead of giving a warning.
        ignore_without_gradient: Ignore operations and places that ran without a gradient.

    Raises:
        PolicyError: If ``strict``.
    """
    parts = [row.message(ignore_taken=True, ignore_without_gradient=ignore_without_gradient)]
    if strict:
        opaque = row.opaque_calls
        parts += [f"cannot see into {_listed(opaque)}"] if opaque else []
        parts += [
            f"the result of operation {operation!r} went through {function}, which lost its gradient: "
            "write .detach() if none is meant"
            for operation, function in row.seen.lost
        ]
    warn_or_raise(subject, "; ".join(filter(None, parts)), strict=strict)


def warn_or_raise(subject: str, message: str, *, strict: bool) -> None:
    """Give a warning, or raise an error if strict, unless the message is empty or an exception propagates."""
    if not message or sys.exception() is not None:
        return
    if strict:
        raise PolicyError(f"{subject}: {message}")
    warn_user(f"{subject}: {message}")


@dataclass(frozen=True)
class Report(Displayed):
    """A table with a row for each policy."""

    rows: tuple[ReportRow, ...]

    def __rich__(self) -> "RenderableType":
        """Render the rows as a table, followed by a line for each call in which a policy cannot act."""
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        table = Table(title="Gradient policies", title_justify="left")
        for heading in ("policy", "kind", "where", "active", "modules", "matched", "parameters"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            active = "yes" if row.active else "no"
            counts = str(len(row.modules) or "–"), _matched(row), str(len(row.parameters) or "–")
            # Brackets are part of globs, not of rich's markup.
            table.add_row(*map(escape, (row.name, row.kind, row.where, active, *counts)))
        opaque = (
            escape(f"{row.name}: cannot see into {call}: {reason}")
            for row in self.rows
            for call, reason in row.opaque_calls.items()
        )
        return Group(table, *opaque)


def _matched(row: ReportRow) -> str:
    if not row.operations:
        return str(row.operations_matched or "–")
    counts = ", ".join(f"{operation} × {row.matched.get(operation, 0)}" for operation in row.operations)
    return f"{counts} (compiled: once a trace)" if row.compiled else counts


def _operations(names: list[str]) -> str:
    return f"operation {_quoted(names)} was" if len(names) == 1 else f"operations {_quoted(names)} were"


def _listed(names: Iterable[str]) -> str:
    return shortened(list(names), most=8)


def _quoted(names: Iterable[str]) -> str:
    *most, last = [repr(name) for name in names]
    return f"{', '.join(most)} and {last}" if most else last
