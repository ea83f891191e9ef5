"""The summary of a sweep: a table of its jobs."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradpolicy.display import three_digits
from gradpolicy.errors import PolicyError
from gradpolicy.insight.run_files import Result

# In the directory of a sweep: a result for each job, and a table of all.
RESULTS, SUMMARY = "results", "summary.csv"
OWN_COLUMNS = ("job", "best", "status", "error", "directory")


@dataclass(frozen=True)
class SweepSummary:
    """The settings of a sweep's jobs, and their results.

    Args:
        results: The results of the jobs.
        metric: The metric by which jobs are compared.
        mode: ``"min"`` or ``"max"``.
    """

    results: Sequence[Result]
    metric: str | None = None
    mode: str = "max"

    @property
    def heading(self) -> str:
        """The heading of the metric's column."""
        return self.metric or "metric"

    @property
    def best(self) -> int | None:
        """The index of the best result; None if no job has one."""
        valued = {job: each.optimized for job, each in enumerate(self.results) if each.optimized is not None}
        numbers = {job: value for job, value in valued.items() if not math.isnan(value)}
        return (min if self.mode == "min" else max)(numbers, key=numbers.__getitem__, default=None)

    @cached_property
    def settings(self) -> list[dict[str, str]]:
        """The overrides of each job, values by key."""
        return [dict(map(_key_and_value, result.overrides)) for result in self.results]

    @property
    def keys(self) -> list[str]:
        """The keys that any job set."""
        return list(dict.fromkeys(key for given in self.settings for key in given))

    @property
    def varied(self) -> list[str]:
        """The keys that not all jobs set to the same value."""
        return [key for key in self.keys if len({given.get(key) for given in self.settings}) > 1]

    @property
    def runs(self) -> list[Path]:
        """The directories of the runs that were completed."""
        return [Path(each.directory) for each in self.results if each.status == "completed"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each job, with a column for each key that any job set."""
        keys = [key for key in self.keys if key not in OWN_COLUMNS]
        return [
            {
                "job": job,
                **{key: settings.get(key) for key in keys},
                self.heading: result.optimized,
                "best": job == self.best,
                **{column: getattr(result, column) for column in ("status", "error", "directory")},
            }
            for job, (settings, result) in enumerate(zip(self.settings, self.results, strict=True))
        ]

    # ---- printing and writing

    def show(self, console: Console) -> None:
        """Print a table of the jobs, and the overrides that they have in common."""
        table = Table(title="Sweep", title_justify="left", title_style="bold", header_style="bold")
        table.add_column("job", justify="right")
        for key in self.varied:
            # A key in a narrow column.
            table.add_column(escape(key.replace(".", ".\n")), overflow="fold")
        for heading in (self.heading, "best"):
            table.add_column(escape(heading), justify="right", overflow="fold")
        for job, (settings, result) in enumerate(zip(self.settings, self.results, strict=True)):
            values = [three_digits(settings.get(key, "–")) for key in self.varied]
            is_best = job == self.best
            cells = [str(job), *values, result.error or _number(result.optimized), "*" if is_best else ""]
            style = "bold green" if is_best else "red" if result.status == "failed" else ""
            # Brackets in overrides are lists, not rich's markup.
            table.add_row(*map(escape, cells), style=style)
        console.print(table)
        common = [f"{key}={self.settings[0][key]}" for key in self.keys if key not in self.varied]
        if common and len(self.results) > 1:
            console.print(escape(f"all with {' '.join(sorted(common))}"), highlight=False)

    def write(self, path: Path, console: Console) -> None:
        """Write the table as CSV and print its path."""
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]) if self.rows else OWN_COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)
        console.print(escape(f"saved in {path}"), soft_wrap=True)


def collect(sweep_dir: Path) -> list[Result]:
    """Read the results of a sweep's jobs, in order; damaged ones count as failed."""
    paths = [path for path in (sweep_dir / RESULTS).glob("*.json") if path.stem.isdecimal()]
    return [_read(path) for path in sorted(paths, key=lambda path: int(path.stem))]


def _read(path: Path) -> Result:
    try:
        return Result.load(path)
    except PolicyError as error:
        return Result([], status="failed", error=str(error))


def _key_and_value(override: str) -> tuple[str, str]:
    key, given, value = override.partition("=")
    return key.lstrip("+"), value if given else "removed"


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.4g}"
