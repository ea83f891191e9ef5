"""The summary of a sweep: a table of its jobs, means over seeds, a picture."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradpolicy.display import three_digits
from gradpolicy.errors import PolicyError
from gradpolicy.insight.run_files import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

# In the directory of a sweep: a result for each job, and the table of them all.
RESULTS, SUMMARY = "results", "summary.csv"
SEED = "seed"
OWN_COLUMNS = ("job", "best", "status", "error", "directory")


@dataclass(frozen=True)
class SweepSummary:
    """The settings of a sweep's jobs, and their results.

    Args:
        results: The results of the jobs.
        metric: The metric that is compared.
        mode: ``"min"`` or ``"max"``: which value is the best.
    """

    results: Sequence[Result]
    metric: str | None = None
    mode: str = "max"

    @property
    def heading(self) -> str:
        """The heading of the column of values."""
        return self.metric or "metric"

    @property
    def best(self) -> int | None:
        """The index of the best result; None if no job has one."""
        return self._best([result.optimized for result in self.results])

    def _best(self, values: Iterable[float | None]) -> int | None:
        valued = {
            index: value for index, value in enumerate(values) if value is not None and not math.isnan(value)
        }
        choose = min if self.mode == "min" else max
        return choose(valued, key=valued.__getitem__, default=None)

    @cached_property
    def settings(self) -> list[dict[str, str]]:
        """The overrides of each job: their values by their keys."""
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

    def frame(self) -> "pd.DataFrame":
        """Return a row for each job, with a column for each key that any job set."""
        import pandas as pd

        rows = [
            {
                "job": index,
                **{key: given.get(key) for key in self.keys if key not in OWN_COLUMNS},
                self.heading: result.optimized,
                "best": index == self.best,
                "status": result.status,
                "error": result.error,
                "directory": result.directory,
            }
            for index, (result, given) in enumerate(zip(self.results, self.settings, strict=True))
        ]
        return pd.DataFrame(rows)

    def over_seeds(self) -> "pd.DataFrame | None":
        """Return the mean over seeds of each setting, and the standard deviation of the sample.

        Returns:
            A row for each setting with ``mean``, ``std`` (NaN for one seed) and ``count``, in the order of
            the jobs; None if all jobs have the same seed.
        """
        others = [key for key in self.varied if key != SEED]
        if SEED not in self.varied:
            return None
        import pandas as pd

        frame = self.frame()
        frame[self.heading] = pd.to_numeric(frame[self.heading])
        by: Any = others or (lambda _: 0)
        folded = frame.groupby(by, sort=False, dropna=False)[self.heading].agg(["mean", "std", "count"])
        return folded.reset_index()[[*others, "mean", "std", "count"]]

    # ---- printing and writing

    def show(self, console: Console) -> None:
        """Print a table of the jobs, the overrides that they have in common, and a table over seeds."""
        table = self._table("Sweep", self.varied, "best", number="job")
        for index, (result, given) in enumerate(zip(self.results, self.settings, strict=True)):
            value = result.error or "–" if result.optimized is None else f"{result.optimized:.4g}"
            cells = [three_digits(given.get(key, "–")) for key in self.varied]
            style = "bold green" if index == self.best else "red" if result.status == "failed" else ""
            best = "*" if index == self.best else ""
            # In overrides brackets are lists, not rich's markup.
            table.add_row(*map(escape, (str(index), *cells, value, best)), style=style)
        console.print(table)
        common = [f"{key}={self.settings[0][key]}" for key in self.keys if key not in self.varied]
        if common and len(self.results) > 1:
            console.print(escape(f"all with {' '.join(sorted(common))}"), highlight=False)
        folded = self.over_seeds()
        if folded is not None:
            console.print(self._folded_table(folded))

    def _folded_table(self, folded: "pd.DataFrame") -> Table:
        others = list(folded.columns[:-3])
        table = self._table("Over seeds: mean ± standard deviation", others, "seeds")
        best = self._best(folded["mean"])
        for index, row in enumerate(folded.to_dict("records")):
            cells = ["–" if row[key] is None else three_digits(row[key]) for key in others]
            spread = "" if math.isnan(row["std"]) else f" ± {row['std']:.2g}"
            value = "–" if math.isnan(row["mean"]) else f"{row['mean']:.4g}{spread}"
            style = "bold green" if index == best else ""
            table.add_row(*map(escape, (*cells, value, str(row["count"]))), style=style)
        return table

    def _table(self, title: str, keys: Sequence[str], last: str, number: str | None = None) -> Table:
        table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
        if number:
            table.add_column(number, justify="right")
        for key in keys:
            # A narrow column.
            table.add_column(escape(key.replace(".", ".\n")), overflow="fold")
        table.add_column(escape(self.heading), justify="right", overflow="fold")
        table.add_column(last, justify="right")
        return table

    def write(self, path: Path, console: Console, figures: "Sequence[go.Figure]" = ()) -> None:
        """Write the table as CSV and the picture beside it, and print their paths.

        Args:
            path: The file of the CSV.
            console: Where to print.
            figures: More pictures, below that of the jobs.
        """
        self.frame().to_csv(path, index=False)
        written = [path]
        drawn = [figure for figure in (self.picture(), *figures) if figure is not None]
        if drawn:
            parts = [
                figure.to_html(full_html=False, include_plotlyjs=index == 0)
                for index, figure in enumerate(drawn)
            ]
            written.append(path.with_suffix(".html"))
            written[-1].write_text(f'<!doctype html><meta charset="utf-8">{"".join(parts)}', "utf-8")
        for file in written:
            console.print(escape(f"saved in {file}"), soft_wrap=True)

    def picture(self) -> "go.Figure | None":
        """Draw a line for each job through its settings and its value; None without two to compare."""
        from gradpolicy.insight.report.figures import parallel_coordinates

        frame = self.frame()
        frame = frame[frame[self.heading].notna()]
        if len(frame) < 2 or not self.varied:
            return None
        settings = {key: frame[key].fillna("–").tolist() for key in self.varied}
        values = frame[self.heading].astype(float).tolist()
        return parallel_coordinates(settings, self.heading, values, lowest=self.mode == "min")


def collect(sweep_dir: Path) -> list[Result]:
    """Read the results of a sweep's jobs, in the order of the jobs; one that is damaged counts as failed."""
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
