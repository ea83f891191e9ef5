"""The plan as a person sees it: a table, and remarks below."""

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from gradpolicy.errors import shortened

if TYPE_CHECKING:
    from gradpolicy.insight.plan import Plan, PlanRow


def table(rows: tuple["PlanRow", ...]) -> Table:
    """A row a policy: what it is, where it acts, what it matched, what trains at its first step."""
    drawn = Table(title="Plan", title_justify="left", title_style="bold", header_style="bold")
    drawn.add_column("policy", no_wrap=True)
    for heading in ("what", "where", "matches"):
        drawn.add_column(heading, overflow="fold")
    drawn.add_column("entries that train", justify="right")
    for row in rows:
        when = f" ({row.when})" if row.when else ""
        trains = f"{row.training_share:.1%} of {row.entries:,}" if row.entries else ""
        drawn.add_row(*map(escape, (row.name, row.kind + when, row.where, _matched(row), trains)))
    return drawn


def _matched(row: "PlanRow") -> str:
    """What a policy matched, as in ``2 modules, 3 relu`` or ``9 parameters``."""
    calls = [f"{count} {operation}" for operation, count in row.operations.items()]
    return ", ".join([*_counted(row.modules, "module"), *calls, *_counted(row.parameters, "parameter")])


def _counted(count: int, what: str) -> list[str]:
    return [f"{count} {what}{'' if count == 1 else 's'}"] if count else []


def remarks(plan: "Plan") -> list[str]:
    """What to be warned of, what trains in the first step, how masks change, where gradients end."""
    lines = [f"[bold yellow]Warning:[/bold yellow] {escape(warning)}." for warning in plan.warnings]
    lines += [
        f"[bold]{plan.training_entries:,}[/bold] of {plan.entries:,} trainable entries "
        f"({plan.training_entries / max(plan.entries, 1):.1%}) train in the first step."
    ]
    lines += [escape(f"{row.name}: {row.course}.") for row in plan.rows if row.course]
    lines += [
        escape(f"{row.name} goes by {len(row.groups)} groups: {', '.join(row.groups)}.")
        for row in plan.rows
        if row.groups
    ]
    lines += [
        _intersection(plan, names) for names in dict.fromkeys(names for names, _ in plan.combined.values())
    ]
    lines += [escape(f"The gradient is cut at: {cut}") for cut in plan.cuts]
    for names, what in ((plan.without_gradient, "no gradient at all"), (plan.zero_gradient, "only zeros")):
        if names:
            lines.append(f"[yellow]These get {what}[/yellow]: {escape(shortened(names, most=8))}")
    return lines


def _intersection(plan: "Plan", names: tuple[str, ...]) -> str:
    shares = {key: share for key, (holders, share) in plan.combined.items() if holders == names}
    entries = sum(plan.combined_entries[key] for key in shares)
    training = sum(plan.combined_entries[key] * share for key, share in shares.items())
    return (
        f"{' and '.join(names)} share {', '.join(_counted(len(shares), 'parameter'))}:"
        f" their intersection, {training / max(entries, 1):.1%} of {entries:,}, trains."
    )
