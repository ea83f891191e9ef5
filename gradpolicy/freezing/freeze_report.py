"""What freeze policies do at the moment: rows, and a table to print."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradpolicy.display import Displayed

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class FreezeRow:
    """What a freeze policy does at the moment.

    Attributes:
        name: The policy's name.
        source: Its mask source.
        parameters: How many parameters it matches.
        entries: How many entries these have.
        active: How many of them its own masks let train.
        in_effect: Whether the policy's ``when`` lets it act now.
        shared_with: Other policies on some of its parameters; there the intersection of the masks counts.
    """

    name: str
    source: str
    parameters: int
    entries: int
    active: int
    in_effect: bool
    shared_with: tuple[str, ...]

    @property
    def active_share(self) -> float:
        """The share of entries that train."""
        return self.active / max(self.entries, 1)


@dataclass(frozen=True)
class FreezeReport(Displayed):
    """One row per freeze policy, by index or in a loop. Printing it gives a table."""

    rows: tuple[FreezeRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[FreezeRow]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> FreezeRow:
        return self.rows[index]

    def __rich__(self) -> "RenderableType":
        """Renders the rows as a table."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title="Freeze policies", title_justify="left")
        for heading in ("policy", "mask source", "in effect", "shared with"):
            table.add_column(heading, overflow="fold")
        for heading in ("parameters", "entries", "train", "share"):
            table.add_column(heading, justify="right")
        for row in self.rows:
            texts = (
                row.name,
                row.source,
                "yes" if row.in_effect else "no",
                ", ".join(row.shared_with) or "–",
            )
            numbers = (str(row.parameters), f"{row.entries:,}", f"{row.active:,}", f"{row.active_share:.1%}")
            # Brackets are of arguments, not of rich's markup.
            table.add_row(*map(escape, texts), *numbers)
        return table
