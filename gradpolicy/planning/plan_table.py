"""The plan as a table with remarks below it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape

from gradpolicy.display import Displayed, text_table
from gradpolicy.errors import shortened
from gradpolicy.what_trains import Layers

HEADINGS = ("policy", "what", "where", "matches", "entries that train")


@dataclass(frozen=True)
class PlanRow:
    """A policy and everything that it matches.

    Args:
        name: The policy's name.
        policy: The policy's class.
        what: Its effect: the class, and the mask source of a freeze policy.
        where: The location, as code.
        modules: The modules that it matched.
        operations: The number of calls of each operation that it matched in one step.
        parameters: The parameters that it matched.
        entries: The number of their entries.
        active_share: The share of these entries that is active at the policy's first step.
        training_share: The share that trains: without parameters that get no gradient, or only zeros.
        groups: For a freeze policy that works by layers: the names of its groups.
        phases: The phases in which it is active.
        when: The times at which it is active, as text; empty if it is active throughout training.
        course: For a freeze policy: its mask source, when masks may change, what happens to frozen state; for
            rates: the initial settings of parameters.
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

    @property
    def training_entries(self) -> int:
        """The number of entries that are active then and get a gradient that is not zero."""
        return round(self.entries * self.training_share)

    @property
    def remarks(self) -> list[str]:
        """Remarks on a freeze policy: how its masks change, and its groups of layers."""
        lines = [f"{self.name}: {self.course}."] if self.course else []
        if self.groups:
            lines.append(f"{self.name} goes by {len(self.groups)} groups: {', '.join(self.groups)}.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values, with what programs need not derive themselves."""
        active = round(self.entries * self.active_share)
        return {**asdict(self), "matched": self.modules, "active_entries": active, "remarks": self.remarks}


@dataclass(frozen=True)
class Plan(Displayed):
    """The effect of all policies together in the first training step.

    Args:
        rows: One row per policy.
        entries: Entries of all trainable parameters.
        training_entries: The number that train: not frozen, and with a gradient that is not zero.
        cuts: Where the gradient is cut.
        without_gradient: Parameters that get no gradient.
        zero_gradient: Parameters whose gradient is zero in every entry.
        warnings: Policies without effect or with an unexpected one; missing gradients come first.
        layers: What trains in the first step: rows with ``name``, ``trains``, ``share``, ``rate`` and
            ``mode`` of a layer, or of several alike ones.
        idle: The parameters without a gradient that make no layer.
    """

    rows: tuple[PlanRow, ...]
    entries: int
    training_entries: int
    cuts: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    zero_gradient: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    layers: Layers = field(default_factory=partial(Layers, (), ""))
    idle: tuple[str, ...] = ()

    def __rich__(self) -> RenderableType:
        """Render the plan as a table of policies and one of layers, with its remarks below."""
        table = text_table("Plan", HEADINGS, map(cells, self.rows), right=HEADINGS[-1:])
        table.columns[0].no_wrap = True
        return Group(table, self.layers.table(), escape(self.layers.unmatched), *remarks(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, the content of ``plan.json``."""
        return {
            **asdict(self),
            "rows": [row.to_dict() for row in self.rows],
            "layers": self.layers.to_dict(),
        }


def cells(row: PlanRow) -> tuple[str, ...]:
    """Return a policy's cells by the headings of the table."""
    when = f" ({row.when})" if row.when else ""
    trains = f"{row.training_share:.1%} of {row.entries:,}" if row.entries else ""
    return row.name, row.what + when, row.where, _matched(row), trains


def _matched(row: PlanRow) -> str:
    """Return a text on the matches of a policy, such as ``2 modules, 3 relu`` or ``9 parameters``."""
    calls = [f"{count} {operation}" for operation, count in row.operations.items()]
    return ", ".join(
        [*_counted(len(row.modules), "module"), *calls, *_counted(len(row.parameters), "parameter")]
    )


def _counted(count: int, what: str) -> list[str]:
    return [f"{count} {what}{'' if count == 1 else 's'}"] if count else []


def remarks(plan: Plan) -> list[str]:
    """Return the lines below the table: warnings, what trains first, how masks change, cuts."""
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
