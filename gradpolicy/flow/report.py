"""What the installed policies matched and met, as rows and as a table to print."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradpolicy.flow.unmet import Met


@dataclass(frozen=True)
class ReportRow:
    """What one policy matched and met.

    Args:
        name: The policy's name.
        kind: Its class.
        where: Where it acts, as it was written.
        active: Whether it holds now.
        modules: Names of the modules that it matched, at whose boundary or below which it acts.
        operations: Names of the operations that it is for.
        met: What ran where it acts, and which of its operations were not met.
        matched: How often its rule was put on each operation, or passed at each boundary or parameter.
        parameters: Names of the parameters that it matched.
        unseen: Calls that it could not see into, each with the reason.
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
    unseen: Mapping[str, str] = field(default_factory=dict)
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
class Report:
    """A row a policy; printing it gives a table."""

    rows: tuple[ReportRow, ...]

    def __str__(self) -> str:
        from rich.console import Console
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
        console = Console(width=120, color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(table)
            for row in self.rows:
                for call, reason in row.unseen.items():
                    console.print(f"{row.name}: cannot see into {call}: {reason}", markup=False)
        return captured.get().rstrip()


def _count(names: tuple[str, ...]) -> str:
    return str(len(names)) if names else "–"


def _matched(row: ReportRow) -> str:
    if not row.operations:
        return str(row.operations_matched) if row.matched else "–"
    counts = ", ".join(f"{operation} × {row.matched.get(operation, 0)}" for operation in row.operations)
    return f"{counts} (compiled: once a trace)" if row.compiled else counts
