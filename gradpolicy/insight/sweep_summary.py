"""The summary of a sweep: a table of its jobs, and means over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradpolicy.display import three_digits, wide_console
from gradpolicy.errors import PolicyError
from gradpolicy.insight.report import write_report
from gradpolicy.insight.run_files import REPORT, RESULT, Result

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = "summary.csv"
SEED = "seed"
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
    metric: str = "metric"
    mode: str = "max"

    @property
    def best(self) -> int | None:
        """The index of the best result; None if no job has one."""
        numbers = {index: result.optimized for index, result in enumerate(self.results)}
        valued = {at: value for at, value in numbers.items() if value is not None and not math.isnan(value)}
        choose = min if self.mode == "min" else max
        return choose(valued, key=valued.__getitem__, default=None)

    @cached_property
    def settings(self) -> "pd.DataFrame":
        """The overrides of each job, with a column for each key that any job set."""
        import pandas as pd

        given = [dict(_key_and_value(each) for each in result.overrides) for result in self.results]
        table = pd.DataFrame(given, index=range(len(given)), dtype=object)
        return table.drop(columns=[*OWN_COLUMNS], errors="ignore")

    @property
    def varied(self) -> list[str]:
        """The keys that not all jobs set to the same value."""
        return [key for key in self.settings if self.settings[key].nunique(dropna=False) > 1]

    def frame(self) -> "pd.DataFrame":
        """Return a row for each job, with a column for each key that any job set."""
        table = self.settings.copy()
        table.insert(0, "job", range(len(table)))
        table[self.metric] = [result.optimized for result in self.results]
        table["best"] = table["job"] == self.best
        for column in ("status", "error", "directory"):
            table[column] = [getattr(result, column) for result in self.results]
        return table

    def over_seeds(self) -> "pd.DataFrame | None":
        """Return the mean over seeds of each setting, and the sample standard deviation.

        Returns:
            A row for each setting with ``mean``, ``std`` (NaN for one seed) and ``count``, in the order of
            the jobs; None if all jobs have the same seed.
        """
        others = [key for key in self.varied if key != SEED]
        if SEED not in self.varied:
            return None
        import pandas as pd

        frame = self.frame().astype({self.metric: float})
        by = others or pd.Series(0, frame.index)
        folded = frame.groupby(by, sort=False, dropna=False)[self.metric].agg(["mean", "std", "count"])
        return folded.reset_index()[[*others, "mean", "std", "count"]]

    # ---- printing and writing

    def show(self, console: Console) -> None:
        """Print a table of the jobs, and one of means over seeds."""
        frame = self.frame()
        shown = frame[["job"]].join(frame[self.varied].fillna("–").map(three_digits))
        shown[self.metric] = [result.error or _number(result.optimized) for result in self.results]
        shown["best"] = ["*" if is_best else "" for is_best in frame["best"]]
        _print(shown, "Sweep", console)
        folded = self.over_seeds()
        if folded is not None:
            spread = [f" ± {std:.2g}" if std >= 0 else "" for std in folded["std"]]
            means = [_number(mean) + text for mean, text in zip(folded["mean"], spread, strict=True)]
            settings = folded.drop(columns=["mean", "std", "count"]).fillna("–").map(three_digits)
            shown = settings.assign(**{self.metric: means, "seeds": folded["count"]})
            _print(shown, "Over seeds: mean ± standard deviation", console)

    def write(self, path: Path, console: Console) -> None:
        """Write the table as CSV and print its path."""
        self.frame().to_csv(path, index=False)
        console.print(escape(f"saved in {path}"), soft_wrap=True)


def summarize(directory: Path, metric: str | None, mode: str, *, report: bool) -> None:
    """Print the summary of the jobs in the directory of a sweep; write it there, and the report of its runs.

    Args:
        directory: The directory.
        metric: The metric by which jobs are compared.
        mode: ``"min"`` or ``"max"``.
        report: False writes no report.
    """
    results = collect(directory)
    if not results:
        return
    summary, console = SweepSummary(results, metric or "metric", mode), wide_console()
    summary.show(console)
    summary.write(directory / SUMMARY, console)
    completed = [Path(each.directory) for each in results if each.status == "completed"]
    if report and completed:
        write_report(completed, directory / REPORT, console, names_it=True)


def collect(directory: Path) -> list[Result]:
    """Read the results of a sweep's jobs in its directory, in order; damaged ones count as failed."""
    paths = directory.glob(f"*/{RESULT}")
    return [_read(path) for path in sorted(paths, key=lambda path: (len(path.parent.name), path))]


def _read(path: Path) -> Result:
    try:
        return Result.load(path)
    except PolicyError as error:
        return Result([], status="failed", error=str(error))


def _print(shown: "pd.DataFrame", title: str, console: Console) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for name in shown:
        # Keys break after a dot, so that their columns are narrow. Brackets in overrides are no markup.
        table.add_column(escape(str(name).replace(".", ".\n")), overflow="fold")
    for row in shown.astype(str).itertuples(index=False):
        table.add_row(*map(escape, row))
    console.print(table)


def _key_and_value(override: str) -> tuple[str, str]:
    key, given, value = override.partition("=")
    return key.lstrip("+"), value if given else "removed"


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.4g}"
