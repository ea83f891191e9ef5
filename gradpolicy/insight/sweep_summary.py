"""The summary of a sweep: a table of its jobs, and means over seeds."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gradpolicy.display import text_table, three_digits, wide_console
from gradpolicy.errors import PolicyError
from gradpolicy.insight.report import write_report
from gradpolicy.insight.run_files import REPORT, RESULT, Result

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = "summary.csv"
SEED = "seed"
# What the table has of each result.
TOLD = ("status", "error", "directory")


class SweepSummary:
    """The settings of a sweep's jobs, and their results.

    Args:
        results: The results of the jobs.
        metric: The metric by which jobs are compared.
        mode: ``"min"`` or ``"max"``.

    Attributes:
        jobs: A row for each job, with a column for each key that any job set, and with its result.
        varied: The keys that not all jobs set to the same value.
        best: The index of the best result; None if no job has one.
    """

    def __init__(self, results: Sequence[Result], metric: str = "metric", mode: str = "max") -> None:
        import pandas as pd

        given = [dict(_key_and_value(each) for each in result.overrides) for result in results]
        settings = pd.DataFrame(given, index=range(len(given)), dtype=object)
        settings = settings.drop(columns=["job", "best", *TOLD], errors="ignore")
        values = pd.Series([result.optimized for result in results], dtype=float)
        numbers = values.dropna()
        best = numbers.idxmin if mode == "min" else numbers.idxmax
        self.metric = metric
        self.varied = [key for key in settings if settings[key].nunique(dropna=False) > 1]
        self.best = None if numbers.empty else int(best())
        self.jobs = settings.rename_axis("job").reset_index().assign(**{metric: values})
        self.jobs["best"] = self.jobs["job"] == self.best
        self.jobs[[*TOLD]] = pd.DataFrame(results)[[*TOLD]]

    def over_seeds(self) -> "pd.DataFrame | None":
        """Return the mean over seeds of each setting, and the sample standard deviation.

        Returns:
            A row for each setting with ``mean``, ``std`` (NaN for one seed) and ``count``, in the order of
            the jobs; None if all jobs have the same seed.
        """
        if SEED not in self.varied:
            return None
        others = [key for key in self.varied if key != SEED]
        by = others or 0 * self.jobs["job"]
        folded = self.jobs.groupby(by, sort=False, dropna=False)[self.metric].agg(["mean", "std", "count"])
        return folded.reset_index()[[*others, "mean", "std", "count"]]

    # ---- printing and writing

    def show(self, console: Console) -> None:
        """Print a table of the jobs, and one of means over seeds."""
        jobs = self.jobs
        shown = jobs[["job"]].join(jobs[self.varied].fillna("–").map(three_digits))
        shown[self.metric] = jobs["error"].where(jobs["error"] != "", jobs[self.metric].map(_number))
        shown["best"] = jobs["best"].map({True: "*", False: ""})
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
        self.jobs.to_csv(path, index=False)
        console.print(f"saved in {path}", soft_wrap=True, markup=False)


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
    # Keys break after a dot, so that their columns are narrow.
    headings = [str(name).replace(".", ".\n") for name in shown]
    console.print(text_table(title, headings, shown.astype(str).itertuples(index=False)))


def _key_and_value(override: str) -> tuple[str, str]:
    key, given, value = override.partition("=")
    return key.lstrip("+"), value if given else "removed"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"
