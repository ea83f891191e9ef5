"""Means and standard deviations over seeds, as a table to print, CSV and Markdown."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from comparisons.families import Column, Family
from comparisons.runs import Run
from gradpolicy.errors import PolicyError

NONE = "–"


@dataclass(frozen=True)
class Summary:
    """What the runs with several seeds gave.

    Attributes:
        mean: Their mean; NaN where there is none.
        spread: Their sample standard deviation, with n − 1; NaN of fewer than two.
    """

    mean: float
    spread: float

    @staticmethod
    def of(values: Sequence[float]) -> "Summary":
        """Summarises values.

        Example:
            >>> Summary.of([1.0, 2.0, 3.0])
            Summary(mean=2.0, spread=1.0)
        """
        mean = statistics.fmean(values) if values else math.nan
        return Summary(mean, statistics.stdev(values) if len(values) > 1 else math.nan)

    def text(self, digits: int) -> str:
        """As it stands in a table."""
        if math.isnan(self.mean):
            return NONE
        spread = "" if math.isnan(self.spread) else f" ± {self.spread:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


@dataclass(frozen=True)
class Row:
    """A variant's row.

    Attributes:
        name: The variant.
        seeds: How many runs of it are finished.
        summaries: One a column.
    """

    name: str
    seeds: int
    summaries: tuple[Summary, ...]


def make_rows(family: Family, runs: Sequence[Run]) -> list[Row]:
    """Summarises the finished runs of each variant.

    Raises:
        PolicyError: If none is finished.
    """
    rows = []
    for variant in family.variants:
        found = [run.result for run in runs if run.variant == variant.name]
        metrics = [result.metrics for result in found if result is not None]
        summaries = tuple(
            Summary.of([each[column.metric] * column.factor for each in metrics if column.metric in each])
            for column in family.columns
        )
        rows.append(Row(variant.name, len(metrics), summaries))
    if not any(row.seeds for row in rows):
        raise PolicyError("none of the runs is finished")
    return rows


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    """A row as text."""
    texts = [summary.text(column.digits) for summary, column in zip(row.summaries, columns, strict=True)]
    return [row.name, *texts, str(row.seeds)]


def headings(columns: Sequence[Column]) -> list[str]:
    """The headings of :func:`cells`."""
    return ["", *(column.heading for column in columns), "seeds"]


def printed(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """The table for a terminal."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for index, heading in enumerate(headings(columns)):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*cells(row, columns))
    return table


def markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The table in Markdown."""
    lines = [headings(columns), ["---", *["---:"] * (len(columns) + 1)]]
    lines += [cells(row, columns) for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_csv(rows: Sequence[Row], columns: Sequence[Column], path: Path) -> None:
    """Writes means and spreads in full."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = [name for column in columns for name in (column.heading, f"{column.heading}, spread")]
        writer.writerow(["variant", *names, "seeds"])
        for row in rows:
            values = [value for summary in row.summaries for value in (summary.mean, summary.spread)]
            writer.writerow([row.name, *("" if math.isnan(value) else value for value in values), row.seeds])
