"""The report of policies, and warnings of what did not happen."""

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
    """One policy or ``gradient_override``: where it acts, and what happened there.

    Args:
        name: The policy's name.
        kind: Its class.
        where: Where it acts, as it was written.
        active: Whether it is active now.
        modules: Names of the modules that it matched: it acts at their boundary or inside them.
        operations: Names of the operations that it names.
        parameters: Names of the parameters that it matched.
        seen: What happened there so far.
        any_of: Whether one of the operations is enough, as for the default of ``StraightThrough``.
        places: Where the gradient was to reach its rule: sides of modules that ran, and parameters. True for
            those that were named one by one; of others, which a glob or class matched, one is enough.
        idle: The modules that it matched and whose forward never ran.
        aliases: Other names of what it matched, which it does not name and where it acts too.
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
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def matched(self) -> Mapping[str, int]:
        """How often its rule was put on each operation, or passed at each boundary or parameter."""
        return dict(self.seen.matched)

    @property
    def opaque_calls(self) -> Mapping[str, str]:
        """Calls inside which it cannot act on operations, each with the reason."""
        return dict(sorted(self.seen.opaque))

    @property
    def compiled(self) -> bool:
        """True if some of the counts were taken while ``torch.compile`` traced, once a trace."""
        return self.seen.compiled

    @property
    def operations_met(self) -> frozenset[str]:
        """Names of all operations that ran where it acts."""
        seen = self.seen
        return frozenset({*seen.ran, *seen.matched, *seen.without_gradient, *seen.discrete})

    @property
    def operations_matched(self) -> int:
        """How often the rule was put on a call, in all."""
        return sum(self.seen.matched.values())

    @property
    def unmet(self) -> tuple[str, ...]:
        """The operations that should have run and did not."""
        excused = {*self.seen.matched, *self.seen.off}
        if "off" in self.seen.forward:
            # What ran while the policy was inactive need not run while it is active.
            excused |= self.seen.ran
        missing = tuple(name for name in self.operations if name not in excused)
        return () if self.any_of and len(missing) < len(self.operations) else missing

    @property
    def untouched(self) -> tuple[str, ...]:
        """The places that a gradient should have crossed and did not."""
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
        """Return what to say of what did not happen as it was meant; empty if there is nothing.

        Args:
            ignore_taken: Say nothing of operations that an inner override or policy took.
            ignore_without_gradient: Say nothing of operations and places that ran without a gradient.
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
        for name, others in self.aliases.items():
            yield (
                f"{name} is also {_quoted(others)}, and the policy acts under each name: name all of them, "
                "or give each its own"
            )

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
        """Return what may be meant instead of operations that never ran."""
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
    """Check, after a step, that operations which a policy names ran where it acts.

    Args:
        row: The policy's row.
        may_get_gradient: Whether an operation that ran where no gradient is recorded may still get one.

    Returns:
        What to say of what did not happen as it was meant; empty if all did.

    Raises:
        PolicyError: If none of them ran.
    """
    message, unmet = row.message(), set(row.unmet)
    may_come = may_get_gradient and unmet & row.seen.without_gradient
    if unmet and not may_come and unmet == set(row.operations):
        raise PolicyError(f"policy.{row.name}.ops: {message}")
    return message


def report_unmet(
    subject: str, row: ReportRow, *, strict: bool, ignore_without_gradient: bool = False
) -> None:
    """Warn at the end of a block of what did not happen as it was meant.

    Of calls that cannot be seen into, and of lost gradients, warnings were given as they ran; a strict block
    raises for them too.

    Nothing is said of operations that an inner override or policy took, since that is how these nest; nor
    while an exception propagates.

    Args:
        subject: Whose block it is, for the message.
        row: What was to happen, and what did.
        strict: Raise, instead of giving a warning.
        ignore_without_gradient: Say nothing of what ran without a gradient.

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
    """Warn, or raise if strict; not without a message, nor while an exception propagates."""
    if not message or sys.exception() is not None:
        return
    if strict:
        raise PolicyError(f"{subject}: {message}")
    warn_user(f"{subject}: {message}")


@dataclass(frozen=True)
class Report(Displayed):
    """One row per policy. Printing it gives a table."""

    rows: tuple[ReportRow, ...]

    def __rich__(self) -> "RenderableType":
        """Render the rows as a table, with a line below for each call that a policy cannot see into."""
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        table = Table(title="Gradient policies", title_justify="left")
        for heading in ("policy", "kind", "where", "active", "modules", "matched", "parameters"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            active = "yes" if row.active else "no"
            counts = str(len(row.modules) or "–"), _matched(row), str(len(row.parameters) or "–")
            # Brackets are of globs, not of rich's markup.
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
