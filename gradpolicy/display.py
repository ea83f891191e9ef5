"""Displays results as tables in terminals, rich consoles and notebooks."""

import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

# Text without colours is for files and pages, where lines are not wrapped.
WIDTH = 120
# In a notebook rich would display the text in addition to returning it, hence `force_jupyter=False`.
# Uses the notebook's colours; wide tables scroll.
HTML = '<pre style="overflow-x: auto; line-height: 1.2">{code}</pre>'


class Displayed(ABC):
    """Mixin: displays a class with ``__rich__`` as a table in ``print`` and in notebooks."""

    @abstractmethod
    def __rich__(self) -> "RenderableType":
        """Render this for rich."""

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        """Render this for a notebook."""
        return as_html(self)


def text_table(
    title: str, headings: Iterable[str], rows: Iterable[Iterable[str]], *, right: Collection[str] = ()
) -> "Table":
    """Return a table of text, of which brackets, as in globs, are no markup.

    Args:
        title: What stands above it.
        headings: The headings of its columns.
        rows: The text of the cells.
        right: The headings of columns that are aligned at their right.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", title_style="bold", header_style="bold")
    for heading in headings:
        justify: Any = "right" if heading in right else "left"
        table.add_column(escape(heading), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def wide_console() -> "Console":
    """Return a console as wide as the terminal; 120 columns if the output is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


def as_text(shown: "RenderableType") -> str:
    """Render something as plain text, 120 columns wide."""
    lines = _printed(shown).export_text().rstrip().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def as_html(shown: "RenderableType") -> str:
    """Render something as HTML, without a style of its own for the page around it."""
    return _printed(shown).export_html(code_format=HTML, inline_styles=True)


def _printed(shown: "RenderableType") -> "Console":
    """Return a console that has recorded something."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=False, force_jupyter=False)
    console.print(shown)
    return console


def three_digits(value: Any) -> str:
    """Return a value as text; numbers with three significant digits.

    Example:
        >>> three_digits(0.00375619), three_digits(1500), three_digits("0.74367"), three_digits("guided")
        ('0.00376', '1500', '0.744', 'guided')
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return str(value) if isinstance(value, bool) or number.is_integer() else f"{number:.3g}"
