"""The plan as a table with remarks below."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from gradpolicy.display import Displayed
from gradpolicy.errors import shortened

HEADINGS = ("policy", "what", "where", "matches", "entries that train")


@dataclass(frozen=True)
class PlanRow:
    """One policy and everything that it matches.

    Args:
        name: The policy's name.
        policy: The policy's class.
        what: Its effect: the class, and the mask source of a freeze policy.
        where: The place, as a person writes it.
        modules: The modules that it matched.
        operations: How many calls of each operation it matched in one step.
        parameters: The parameters that it matched.
        entries: How many entries these hold.
        active_share: The share of these entries that the policy lets train at its first step.
        training_share: The share that does train: what gets no gradient, or only zeros, is not in it.
        groups: For a freeze policy that goes by layers: the names of its groups.
        phases: The phases in which it holds.
        when: When it holds, as a person writes it; empty where it holds throughout training.
        course: For a freeze policy: its mask source, when masks may change, what becomes of frozen state; for
            rates: what parameters have of their own at first.
        budget: For a source that chooses by scores: which share of what it would choose by the first step's
            gradients lies in which parameter, the largest first.
        vain: The parameters that get no gradient, or only zeros.
    """

    name: str
    policy: str
    what: str
    where: str
    modules: tuple[str, ...] = ()
    operations: Mapping[str, int] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    entries: int = 0
    active_share: float = 1.0
    training_share: float = 1.0
    groups: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("fit",)
    when: str = ""
    course: str = ""
    budget: Mapping[str, float] = field(default_factory=dict)
    vain: tuple[str, ...] = ()

    @property
    def active_entries(self) -> int:
        """The number of entries that the policy lets train at its first step."""
        return round(self.entries * self.active_share)

    @property
    def remarks(self) -> list[str]:
        """Remarks on a freeze policy: how its masks change, and its groups of layers."""
        lines = [f"{self.name}: {self.course}."] if self.course else []
        if self.groups:
            lines.append(f"{self.name} goes by {len(self.groups)} groups: {', '.join(self.groups)}.")
        if self.budget:
            most = [
                f"{share:.1%} to {name}{' (no gradient)' if name in self.vain else ''}"
                for name, share in list(self.budget.items())[:5]
                if share > 0
            ]
            lines.append(f"{self.name}: by this step its choice would go {', '.join(most)}.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values; what it matched stands under ``matched``."""
        own = asdict(self)
        own["matched"] = own.pop("modules")
        return {**own, "active_entries": self.active_entries, "remarks": self.remarks}


@dataclass(frozen=True)
class PlanModule:
    """A module of the model, and the policies on it.

    Args:
        name: Its qualified name; empty for the model itself.
        type: Its class.
        parameters: How many entries its own parameters have, without those of its children.
        policies: The policies that matched it, or a parameter of its own.
    """

    name: str
    type: str
    parameters: int
    policies: tuple[str, ...]


@dataclass(frozen=True)
class Plan(Displayed):
    """The effect of all policies together in the first training step.

    Args:
        rows: One a policy.
        entries: Entries of all trainable parameters.
        training_entries: How many of them train: not frozen, and with a gradient that is not zero.
        cuts: Where the gradient is cut.
        without_gradient: Parameters that get no gradient at all.
        zero_gradient: Parameters whose gradient is zero in every entry.
        warnings: Policies without effect or with an unexpected one; missing gradients come first.
        modules: The modules of the model, in the order in which it has them.
    """

    rows: tuple[PlanRow, ...]
    entries: int
    training_entries: int
    cuts: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    zero_gradient: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    modules: tuple[PlanModule, ...] = ()

    def __rich__(self) -> RenderableType:
        """Render the plan as a table with its remarks below."""
        return Group(table(self.rows), *remarks(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, as ``plan.json`` holds it."""
        return {**asdict(self), "rows": [row.to_dict() for row in self.rows]}


def table(rows: tuple[PlanRow, ...]) -> Table:
    """Return a row a policy: what it is, where it acts, what it matched, what trains at its first step."""
    drawn = Table(title="Plan", title_justify="left", title_style="bold", header_style="bold")
    first, *others, last = HEADINGS
    drawn.add_column(first, no_wrap=True)
    for heading in others:
        drawn.add_column(heading, overflow="fold")
    drawn.add_column(last, justify="right")
    for row in rows:
        drawn.add_row(*map(escape, cells(row)))
    return drawn


def cells(row: PlanRow) -> tuple[str, ...]:
    """Return a policy's texts under the headings of the table."""
    when = f" ({row.when})" if row.when else ""
    trains = f"{row.training_share:.1%} of {row.entries:,}" if row.entries else ""
    return row.name, row.what + when, row.where, _matched(row), trains


def _matched(row: PlanRow) -> str:
    """Return what a policy matched, as in ``2 modules, 3 relu`` or ``9 parameters``."""
    calls = [f"{count} {operation}" for operation, count in row.operations.items()]
    return ", ".join(
        [*_counted(len(row.modules), "module"), *calls, *_counted(len(row.parameters), "parameter")]
    )


def _counted(count: int, what: str) -> list[str]:
    return [f"{count} {what}{'' if count == 1 else 's'}"] if count else []


def remarks(plan: Plan) -> list[str]:
    """Return what to be warned of, what trains in the first step, how masks change, where gradients end."""
    lines = [f"[bold yellow]Warning:[/bold yellow] {escape(warning)}." for warning in plan.warnings]
    lines += [
        f"[bold]{plan.training_entries:,}[/bold] of {plan.entries:,} trainable entries "
        f"({plan.training_entries / max(plan.entries, 1):.1%}) train in the first step."
    ]
    lines += [escape(remark) for row in plan.rows for remark in row.remarks]
    lines += [escape(f"The gradient is cut at: {cut}") for cut in plan.cuts]
    for names, what in ((plan.without_gradient, "no gradient at all"), (plan.zero_gradient, "only zeros")):
        if names:
            lines.append(f"[yellow]These get {what}[/yellow]: {escape(shortened(names, most=8))}")
    return lines
