"""What policies matched and met: rows, a table to print, and messages about operations that never ran."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gradpolicy.display import Displayed
from gradpolicy.errors import PolicyError, nearest, shortened, warn_user
from gradpolicy.flow.operation_tables import SIMILAR
from gradpolicy.flow.operations import operation_names

if TYPE_CHECKING:
    from rich.console import RenderableType

NO_GRADIENT = "ran only where no gradient is recorded (under torch.no_grad, or on tensors that need none)"


NEVER_FLOATING = (
    "never became floating-point there, so no gradient passed: cast it where the rule acts (.float()), or "
    "multiply it with floats"
)


@dataclass(frozen=True)
class Met:
    """What a policy or ``gradient_override`` met where it acts, and what it was to meet.

    Args:
        operations: The operations that it names.
        matched: Those that its rule was put on.
        ran: All operations that ran there.
        without_gradient: Those that ran where no gradient is recorded, and places that none crossed.
        discrete: Those with bool or integer results, which must become floating-point to count as matched.
        taken: Those that an inner override or policy took.
        opaque: Calls into which the rule cannot see: they may run some of them inside torch.
        excused: Those that need not be met, since they ran while the policy was inactive.
        any_of: Whether one of them is enough, as for the default of ``StraightThrough``.
        places: Where the gradient was to meet its rule: sides of modules that ran, and parameters.
        named: Those that were named one by one. Of others, which a glob or class matched, one is enough.
        idle: The modules that it matched and whose forward never ran.
        aliases: Other names of what it matched, which it does not name and where it acts too.
        lost: Operations whose results went into functions that cannot carry the rule's gradient, with these.
    """

    operations: tuple[str, ...] = ()
    matched: Collection[str] = ()
    ran: Collection[str] = ()
    without_gradient: Collection[str] = ()
    discrete: Collection[str] = ()
    taken: Collection[str] = ()
    opaque: Collection[str] = ()
    excused: Collection[str] = ()
    any_of: bool = False
    places: tuple[str, ...] = ()
    named: Collection[str] = ()
    idle: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lost: Collection[tuple[str, str]] = ()

    @property
    def unmet(self) -> tuple[str, ...]:
        """The operations that should have been met and were not."""
        missing = tuple(
            name for name in self.operations if name not in self.matched and name not in self.excused
        )
        return () if self.any_of and len(missing) < len(self.operations) else missing

    @property
    def untouched(self) -> tuple[str, ...]:
        """The places that a gradient should have crossed and did not."""
        acted = any(place in self.matched for place in self.places)
        return tuple(
            place
            for place in self.places
            if place not in self.matched
            and place not in self.excused
            and (place in self.named or not acted)
            and not any(call.endswith(f" at {place}") for call in self.opaque)
        )

    def message(self) -> str:
        """What to say of what was not met as it was meant; empty if there is nothing."""
        return "; ".join([*self._about_operations(), *self._about_places()])

    def _about_places(self) -> Iterator[str]:
        parameters = [place for place in self.untouched if place.startswith("parameter ")]
        crossed = [place for place in self.untouched if place not in parameters]
        if self.idle:
            yield (
                f"{_modules(self.idle)} never ran through its forward; another method of it, or a function "
                "of its weights, passes the policy by"
            )
        if crossed:
            yield (
                f"no gradient crosses {_listed(crossed)}: what passes there needs none (it is data, comes "
                "from frozen modules, or runs under torch.no_grad)"
            )
        if parameters:
            yield (
                f"no gradient came to {_listed(parameters)}: it is frozen, not used, or no backward pass ran"
            )
        for name, others in self.aliases.items():
            yield (
                f"{name} is also {_quoted(others)}, and the policy acts under each name: name all of them, "
                "or give each its own"
            )

    def _about_operations(self) -> list[str]:
        unmet = self.unmet
        taken = [name for name in unmet if name in self.taken]
        discrete = [name for name in unmet if name in self.discrete and name not in taken]
        without = [
            name for name in unmet if name in self.without_gradient and name not in (*taken, *discrete)
        ]
        never = [name for name in unmet if name not in (*taken, *discrete, *without)]
        parts = []
        if taken:
            parts.append(f"{_operations(taken)} taken by another override or policy inside")
        if discrete:
            parts.append(f"the result of {_quoted(discrete)} {NEVER_FLOATING}")
        if without:
            parts.append(
                f"{'operation' if len(without) == 1 else 'operations'} {_quoted(without)} {NO_GRADIENT}"
            )
        if never and not (self.any_of and parts):
            parts.append(f"{_operations(never)} never met; {self._instead(never)}")
        return parts

    def _instead(self, never: list[str]) -> str:
        """What may be meant instead of operations that never ran."""
        if any(name in self.ran for name in never):
            return "it ran only with arguments that make it another operation"
        likely = dict.fromkeys(name for operation in never for name in SIMILAR.get(operation, ()))
        similar = [name for name in likely if name in self.ran][:4]
        if similar:
            return f"near it, {_quoted(similar)} ran there: name what is meant"
        if self.opaque:
            return f"it may run within {_quoted(self.opaque)}, which cannot be seen into"
        named = sorted(set(self.ran) & set(operation_names()))
        if not named:
            return "nothing ran there that a rule could be put on"
        return nearest(never[0], named).replace("valid names", "what ran there")


def check_met(name: str, met: Met, *, may_get_gradient: bool = False) -> str:
    """Checks, after a step, that operations which a policy names ran where it acts.

    Args:
        name: The policy's name.
        met: What it met.
        may_get_gradient: Whether an operation that ran where no gradient is recorded may still get one.

    Returns:
        What to say of what was not met as it was meant; empty if all was.

    Raises:
        PolicyError: If none of them was.
    """
    message = met.message()
    unmet = set(met.unmet)
    may_come = may_get_gradient and unmet & set(met.without_gradient)
    if unmet and not may_come and unmet == set(met.operations):
        raise PolicyError(f"policy.{name}.ops: {message}")
    return message


def tell_unmet(subject: str, met: Met, *, strict: bool) -> None:
    """Says at the end of a block what was not met as it was meant.

    Of calls that cannot be seen into, and of lost gradients, warnings were given as they ran; a strict block
    raises for them too.

    Nothing is said of operations that an inner override or policy took, since that is how these nest; nor
    while an exception propagates.

    Args:
        subject: Who was to meet them, for the message.
        met: What was met.
        strict: Raise, instead of giving a warning.

    Raises:
        PolicyError: If ``strict``.
    """
    message = replace(met, matched={*met.matched, *met.taken}).message()
    if strict:
        opaque = f"cannot see into {_listed(met.opaque)}" if met.opaque else ""
        lost = [
            f"the result of operation {operation!r} went through {function}, which lost its gradient: "
            "write .detach() if none is meant"
            for operation, function in met.lost
        ]
        message = "; ".join(filter(None, (message, opaque, *lost)))
    tell(subject, message, strict=strict)


def tell(subject: str, message: str, *, strict: bool) -> None:
    """Warns of something, or raises if strict; not without a message, nor while an exception propagates."""
    if not message or sys.exception() is not None:
        return
    if strict:
        raise PolicyError(f"{subject}: {message}")
    warn_user(f"{subject}: {message}")


@dataclass(frozen=True)
class ReportRow:
    """What one policy matched and met.

    Args:
        name: The policy's name.
        kind: Its class.
        where: Where it acts, as it was written.
        active: Whether it is active now.
        modules: Names of the modules that it matched: it acts at their boundary or inside them.
        operations: Names of the operations that it names.
        met: Which operations ran where it acts, and which of its own were not met.
        matched: How often its rule was put on each operation, or passed at each boundary or parameter.
        parameters: Names of the parameters that it matched.
        opaque_calls: Calls inside which it cannot act on operations, each with the reason.
        compiled: Whether some of the counts were taken while ``torch.compile`` traced, once a trace.
    """

    name: str
    kind: str
    where: str
    active: bool
    modules: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    met: Met = field(default_factory=Met)
    matched: Mapping[str, int] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    opaque_calls: Mapping[str, str] = field(default_factory=dict)
    compiled: bool = False

    @property
    def operations_met(self) -> frozenset[str]:
        """Names of all operations that ran where it acts."""
        return frozenset(self.met.ran)

    @property
    def operations_matched(self) -> int:
        """How often the rule was put on a call, in all."""
        return sum(self.matched.values())


@dataclass(frozen=True)
class Report(Displayed):
    """One row per policy. Printing it gives a table."""

    rows: tuple[ReportRow, ...]

    def __rich__(self) -> "RenderableType":
        """Renders the rows as a table, with a line below for each call that a policy cannot see into."""
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        table = Table(title="Gradient policies", title_justify="left")
        for heading in ("policy", "kind", "where", "active", "modules", "matched", "parameters"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            cells = (
                row.name,
                row.kind,
                row.where,
                "yes" if row.active else "no",
                _count(row.modules),
                _matched(row),
                _count(row.parameters),
            )
            # Brackets are of globs, not of rich's markup.
            table.add_row(*map(escape, cells))
        opaque = (
            escape(f"{row.name}: cannot see into {call}: {reason}")
            for row in self.rows
            for call, reason in row.opaque_calls.items()
        )
        return Group(table, *opaque)


def _count(names: tuple[str, ...]) -> str:
    return str(len(names)) if names else "–"


def _matched(row: ReportRow) -> str:
    if not row.operations:
        return str(row.operations_matched) if row.matched else "–"
    counts = ", ".join(f"{operation} × {row.matched.get(operation, 0)}" for operation in row.operations)
    return f"{counts} (compiled: once a trace)" if row.compiled else counts


def _operations(names: list[str]) -> str:
    return f"operation {_quoted(names)} was" if len(names) == 1 else f"operations {_quoted(names)} were"


def _modules(names: Collection[str]) -> str:
    return _listed([f"module {name!r}" if name else "the model" for name in names])


def _listed(names: Iterable[str]) -> str:
    return shortened(list(names), most=8)


def _quoted(names: Iterable[str]) -> str:
    *most, last = [repr(name) for name in names]
    return f"{', '.join(most)} and {last}" if most else last
