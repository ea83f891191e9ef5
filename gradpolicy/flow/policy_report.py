"""The report: where each rule acted, and warnings of rules that did not act."""

import enum
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gradpolicy.display import Displayed, text_table
from gradpolicy.errors import PolicyError, nearest, shortened, warn_user
from gradpolicy.flow.locations import Locations, is_below
from gradpolicy.flow.operations import takes_rule
from gradpolicy.flow.tracing import runs_while_tracing

if TYPE_CHECKING:
    from rich.console import RenderableType

# The way out where a rule cannot act within a call.
ACROSS = "put a rule across the module that calls it (modules=…, at='through'), or gradpolicy.apply around it"


class Outcome(enum.Enum):
    """What happened at a location: an operation, a side of a module, the path across it, or a parameter."""

    ACTED = "the rule was applied"
    PLAIN = "the operation ran without the rule"
    WITHOUT_GRADIENT = "no gradient was recorded"
    OFF = "the rule was inactive"
    DISCRETE = "the result was bool or integer, and not floating-point yet"
    TAKEN = "an inner override or policy acted instead"


# Why a rule did not act at the operations, modules or parameters of its policy, and the words for it. The
# first outcome that occurred there is the reason; None if none of them did.
REASONS: dict[str, dict[Outcome | None, str]] = {
    "operation": {
        Outcome.TAKEN: "operation{s} {names} {were} taken by another override or policy inside",
        Outcome.DISCRETE: "the result of {names} never became floating-point there, so no gradient passed: "
        "cast it where the rule acts (.float()), or multiply it with floats",
        Outcome.WITHOUT_GRADIENT: "operation{s} {names} ran only where no gradient is recorded (under "
        "torch.no_grad, in an autograd.Function, or on tensors that need none)",
        None: "operation{s} {names} {were} never met; {instead}",
    },
    "module": {
        None: "{names} never ran through its forward; another method of it, or a function of its weights, "
        "skips the policy",
        Outcome.WITHOUT_GRADIENT: "no gradient crosses {names}: what passes there needs none (it is data, "
        "comes from frozen modules, or runs under torch.no_grad)",
    },
    "parameter": {
        None: "no gradient came to {names}: it is frozen, not used, or no backward pass ran",
    },
}


@dataclass(eq=False)
class ReportRow:
    """A policy or ``gradient_override`` in a :class:`Report`, with counts of what happened at each location.

    Args:
        name: The policy's name.
        locations: Where it acts.
        kind: The policy's class.
        where: The location in words.
        active: True if the policy is active.
        ran_in: The modules in which one of its operations ran, in eager mode.
        counts: How often each outcome occurred at each location.
        lost: Messages on discrete results of operations whose gradient a function lost.
        opaque_calls: Calls in which the rule cannot act, each with the reason.
        ran_on: True if a forward pass ran with the rule active.
        ran_off: True if one ran with the rule inactive.
        compiled: True if the counts include compiled code, which is counted once per compilation.
        norms: Gradient norms before and after the rule; None if they are not measured.
    """

    name: str
    locations: Locations = None  # type: ignore[assignment]  # of gradpolicy.apply, which is in no report
    kind: str = ""
    where: str = ""
    active: bool = True
    ran_in: set[str] = field(default_factory=set)
    counts: dict[tuple[str, Outcome], int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    opaque_calls: dict[str, str] = field(default_factory=dict)
    ran_on: bool = False
    ran_off: bool = False
    compiled: bool = False
    norms: "GradientNorms | None" = None

    # How often eager code applied any rule. Global, since a caller with only a loss function, such as
    # gradpolicy.curvature, has no reference to the policies that act in it.
    uses: ClassVar[int] = 0

    @runs_while_tracing
    def note(self, location: str, outcome: Outcome, is_traced: bool = False) -> None:
        """Count an outcome at a location. In compiled code this runs once, while the code is traced."""
        self.counts[location, outcome] = self.counts.get((location, outcome), 0) + 1
        ReportRow.uses += outcome is Outcome.ACTED and not is_traced
        self.compiled |= is_traced

    def note_all(self, outcome: Outcome, locations: Iterable[str]) -> None:
        """Count an outcome at several locations."""
        for location in locations:
            self.note(location, outcome)

    @runs_while_tracing
    def note_forward(self, is_on: bool, is_traced: bool) -> None:
        """Record a forward pass, with the rule active or not."""
        self.ran_on |= is_on
        self.ran_off |= not is_on
        self.compiled |= is_traced

    @runs_while_tracing
    def note_lost(self, prefix: str, operation: str, function: str, is_index: bool) -> None:
        """Record, and warn once, that a function lost the gradient of an operation's discrete result."""
        message = _lost_message(operation, function, is_index)
        if message not in self.lost:
            self.lost.add(message)
            warn_user(prefix + message)

    @runs_while_tracing
    def note_opaque(self, call: str, reason: str) -> None:
        """Record, and warn once, that the rule cannot act on operations within a call."""
        if call not in self.opaque_calls:
            self.opaque_calls[call] = reason
            warn_user(f"policy {self.name!r} {self.unseen[-1]}")

    @property
    def unseen(self) -> list[str]:
        """A clause for each call in which the rule cannot act, with the reason."""
        return [f"cannot see into {call}: {reason}" for call, reason in self.opaque_calls.items()]

    def locations_with(self, *outcomes: Outcome) -> set[str]:
        """Return the locations at which one of these outcomes occurred."""
        return {location for location, outcome in self.counts if outcome in outcomes}

    @property
    def matched(self) -> dict[str, int]:
        """The number of times that the rule was applied to each operation and location."""
        counts = self.counts.items()
        return {location: count for (location, outcome), count in counts if outcome is Outcome.ACTED}

    @property
    def operations_met(self) -> frozenset[str]:
        """The names of all operations that ran where the policy acts."""
        ran = (Outcome.ACTED, Outcome.PLAIN, Outcome.WITHOUT_GRADIENT, Outcome.DISCRETE)
        return frozenset(self.locations_with(*ran))

    @property
    def operations_matched(self) -> int:
        """The total number of times that the rule was applied."""
        return sum(self.matched.values())

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of the policy's operations."""
        return tuple(self.locations.expected) if self.locations.kind == "operation" else ()

    def unmet(self) -> list[str]:
        """Return the operations that should have run with the rule and did not."""
        found = self._missing(()).values() if self.operations else ()
        return [name for names in found for name in names]

    @property
    def missed(self) -> list[str]:
        """A clause for the modules that should run one of the operations, as others do, and ran none."""
        each = self.locations.each
        met = {name for name in each if any(is_below(ran, [name]) for ran in self.ran_in)}
        kinds = {each[name] for name in met} | {None}
        found = [name for name, kind in each.items() if name not in met and kind in kinds]
        if self.compiled or self.ran_off or not met or not found:
            return []
        modules = _listed(repr(name) for name in found if not is_below(name.rpartition(".")[0], found))
        return [f"none of the operations ran in module {modules}: name one that does, or exclude it (!…)"]

    def message(self, *ignored: Outcome) -> str:
        """Return a message on operations and locations without the rule; empty if there are none.

        Args:
            *ignored: Operations and locations with one of these outcomes are left out.
        """
        missing = self._missing(ignored)
        if self.operations and len(missing) > 1 and not all(self.locations.expected.values()):
            # One of the operations is enough, and why others had no gradient says more.
            missing.pop(None, None)
        reasons = REASONS[self.locations.kind]
        return "; ".join(self._clause(reasons[each], missing[each]) for each in reasons if each in missing)

    def _missing(self, ignored: Iterable[Outcome]) -> dict[Outcome | None, list[str]]:
        """Return the operations and locations where the rule should have acted and did not, by reason."""
        reached = self.locations_with(Outcome.ACTED, Outcome.OFF, *ignored)
        reached |= {call.partition(" at ")[2] for call in self.opaque_calls}
        if self.ran_off:
            # Operations that ran while the policy was inactive need not run while it is active.
            reached |= self.locations_with(Outcome.PLAIN)
        kind, expected = self.locations.kind, self.locations.expected
        is_enough = not reached.isdisjoint(expected)
        found: dict[Outcome | None, list[str]] = {}
        for location, is_named in expected.items():
            reason = next((each for each in REASONS[kind] if (location, each) in self.counts), None)
            never_ran = kind == "module" and reason is None
            if location not in reached and (is_named or never_ran or not is_enough):
                # Of a module that never ran, the module, not the side of it where the rule acts.
                location = location[location.find("module") :].split(", ")[0] if never_ran else location
                found.setdefault(reason, []).append(location)
        return found

    def _clause(self, text: str, found: list[str]) -> str:
        several = len(found) > 1
        return text.format(
            names=_listed(map(repr, found) if self.operations else found),
            s="s" * several,
            were="were" if several else "was",
            instead=self._instead(found) if "{instead}" in text else "",
        )

    def _instead(self, never: list[str]) -> str:
        """Return a hint for operations that never ran."""
        ran = self.operations_met
        if any(name in ran for name in never):
            return "it ran only with arguments that make it another operation"
        if self.opaque_calls:
            return f"it may run within {_listed(self.opaque_calls)}, which cannot be seen into"
        named = sorted(filter(takes_rule, ran))
        if not named:
            return "nothing ran there that a rule could be put on"
        return nearest(never[0], named).replace("valid names", "what ran there")


def check_operations(row: ReportRow, *, may_get_gradient: bool = False) -> str:
    """Check, after a step, that a policy's operations ran where it acts.

    Args:
        row: The policy's row.
        may_get_gradient: True if operations that ran where no gradient is recorded may get one later.

    Returns:
        A message on operations and locations where the rule was not applied; empty if there are none.

    Raises:
        PolicyError: If none of the operations ran.
    """
    message, unmet = row.message(), set(row.unmet())
    may_come = may_get_gradient and unmet & row.locations_with(Outcome.WITHOUT_GRADIENT)
    if unmet and not may_come and unmet == set(row.operations):
        raise PolicyError(f"policy.{row.name}.ops: {'; '.join([message, *row.unseen])}")
    return message


def report_unmet(subject: str, row: ReportRow, *, strict: bool, ignored: Iterable[Outcome] = ()) -> None:
    """Warn at the end of a block of operations and locations where the rule was not applied.

    Calls in which the rule cannot act, and lost gradients, gave warnings before; if strict, they raise here.
    Operations on which an inner override or policy acted instead are ignored.

    Args:
        subject: The name of the block, for the message.
        row: The row of the policy or ``gradient_override``.
        strict: Raise an error instead of giving a warning.
        ignored: Other outcomes with which operations and locations are ignored.

    Raises:
        PolicyError: If ``strict``.
    """
    parts = [row.message(Outcome.TAKEN, *ignored)]
    if strict:
        parts += [*row.unseen, *row.missed, *sorted(row.lost)]
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

        headings = ("policy", "kind", "where", "active", "modules", "matched", "parameters")
        table = text_table("Gradient policies", headings, map(_cells, self.rows))
        clauses = [f"{row.name}: {each}" for row in self.rows for each in (*row.unseen, *row.missed)]
        return Group(table, *map(escape, clauses))


def _cells(row: ReportRow) -> tuple[str, ...]:
    found = row.locations
    modules, parameters = (str(len(each) or "–") for each in (found.modules, found.parameters))
    return row.name, row.kind, row.where, "yes" if row.active else "no", modules, _matched(row), parameters


def _matched(row: ReportRow) -> str:
    if not row.operations:
        return str(row.operations_matched or "–")
    matched = row.matched
    counts = ", ".join(f"{operation} × {matched.get(operation, 0)}" for operation in row.operations)
    return f"{counts} (compiled: once a trace)" if row.compiled else counts


def _lost_message(operation: str, function: str, is_index: bool) -> str:
    if is_index:
        return (
            f"an index from operation {operation!r} became numbers in {function}, and an index has no "
            "gradient: use the values that the operation gives, F.one_hot(x.argmax(-1), n) with a rule for "
            "'argmax', or detach the index (.detach()) if no gradient is meant"
        )
    return (
        f"the result of operation {operation!r} went through {function}, which lost its gradient: cast it "
        "to floating point before (.float()), put the rule on all of it (gradpolicy.apply), or detach it "
        "(.detach()) if no gradient is meant"
    )


def _listed(names: Iterable[str]) -> str:
    return shortened(list(names), most=8)


class GradientNorms:
    """Sums of squared gradient norms, and of zeros. The tensors stay on their device until they are read.

    Attributes:
        before: The squared norm of the gradients before the rule.
        after: The squared norm of the gradients after the rule.
        zeros: The number of zeros in the gradients after the rule.
        entries: The number of entries of these gradients; 0 if there was none.
    """

    def __init__(self) -> None:
        self.before = self.after = torch.zeros((), device="cpu")
        self.zeros, self.entries = torch.zeros((), dtype=torch.int64, device="cpu"), 0

    def measure(self, before: Any, after: Iterable[Tensor | None]) -> None:
        """Add a gradient, or a tuple of gradients, before and after the rule."""
        with torch.no_grad():
            for tensor in before if isinstance(before, tuple) else (before,):
                if tensor is not None:
                    self.before = _square(tensor) + self.before
            for tensor in filter(torch.is_tensor, after):
                self.after = _square(tensor) + self.after
                self.zeros = tensor.numel() - tensor.count_nonzero() + self.zeros
                self.entries += tensor.numel()


def _square(tensor: Tensor) -> Tensor:
    """Return the squared norm of a gradient."""
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) ** 2
