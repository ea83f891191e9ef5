"""The summary of a sweep: a table of its jobs, means over seeds, a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradpolicy.display import three_digits
from gradpolicy.errors import PolicyError
from gradpolicy.insight.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

# In the directory of a sweep: a result for each job, and the table of them all.
RESULTS, SUMMARY = "results", "summary.csv"
SEED = "seed"
OWN_COLUMNS = ("job", "best", "status", "error", "directory")


@dataclass(frozen=True)
class SweepSummary:
    """What the jobs of a sweep set, and what came of it.

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
        """What the column of values is called."""
        return self.metric or "metric"

    @property
    def best(self) -> int | None:
        """The index of the best result; None if no job has one."""
        valued = {
            index: result.optimized
            for index, result in enumerate(self.results)
            if result.optimized is not None and not math.isnan(result.optimized)
        }
        choose = min if self.mode == "min" else max
        return choose(valued, key=valued.__getitem__, default=None)

    @cached_property
    def settings(self) -> list[dict[str, str]]:
        """What each job set: the value of each override by its key."""
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
    def common(self) -> list[str]:
        """What all jobs set to the same value, as overrides."""
        return [f"{key}={self.settings[0][key]}" for key in self.keys if key not in self.varied]

    def frame(self) -> "pd.DataFrame":
        """A row for each job, a column for each key that any job set."""
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
        """The mean over seeds of each setting, and the spread: the standard deviation of a sample.

        Returns:
            A row for each setting with ``mean``, ``std`` (NaN for one seed) and ``count``, in the order of
            the jobs; None if seeds are not among what differs.
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

    @property
    def runs(self) -> list[Path]:
        """The directories of the runs that were completed."""
        return [Path(each.directory) for each in self.results if each.status == "completed"]

    # ---- printing and writing

    def show(self, console: Console) -> None:
        """Prints a table of the jobs, what they have in common, and a table over seeds."""
        table = _table("Sweep")
        table.add_column("job", justify="right")
        for key in self.varied:
            table.add_column(_in_lines(key), overflow="fold")
        table.add_column(escape(self.heading), justify="right", overflow="fold")
        table.add_column("best", justify="center")
        for index, (result, given) in enumerate(zip(self.results, self.settings, strict=True)):
            value = result.error or "–" if result.optimized is None else f"{result.optimized:.4g}"
            style = "bold green" if index == self.best else "red" if result.status == "failed" else ""
            # In overrides brackets are lists, not rich's markup.
            cells = [escape(three_digits(given.get(key, "–"))) for key in self.varied]
            table.add_row(str(index), *cells, escape(value), "*" if index == self.best else "", style=style)
        console.print(table)
        if self.common and len(self.results) > 1:
            console.print(escape(f"all with {' '.join(sorted(self.common))}"), highlight=False)
        folded = self.over_seeds()
        if folded is not None:
            console.print(self._folded_table(folded))

    def _folded_table(self, folded: "pd.DataFrame") -> Table:
        table = _table("Over seeds: mean ± standard deviation")
        others = list(folded.columns[:-3])
        for key in others:
            table.add_column(_in_lines(key), overflow="fold")
        table.add_column(escape(self.heading), justify="right", overflow="fold")
        table.add_column("seeds", justify="right")
        means = folded["mean"]
        best = None if means.isna().all() else (means.idxmin() if self.mode == "min" else means.idxmax())
        for index, row in folded.iterrows():
            cells = [escape("–" if row[key] is None else three_digits(row[key])) for key in others]
            spread = "" if math.isnan(row["std"]) else f" ± {row['std']:.2g}"
            value = "–" if math.isnan(row["mean"]) else f"{row['mean']:.4g}{spread}"
            table.add_row(*cells, value, f"{row['count']:.0f}", style="bold green" if index == best else "")
        return table

    def write(self, path: Path, console: Console, figures: "Sequence[go.Figure]" = ()) -> None:
        """Writes the table as CSV, the picture and a report of all runs beside it, and says where.

        Args:
            path: Where the CSV goes.
            console: Where to print.
            figures: More pictures, below that of the jobs.
        """
        self.frame().to_csv(path, index=False)
        written = [path]
        drawn = [figure for figure in (self.picture(), *figures) if figure is not None]
        if drawn:
            written.append(path.with_suffix(".html"))
            parts = [
                figure.to_html(full_html=False, include_plotlyjs=index == 0)
                for index, figure in enumerate(drawn)
            ]
            written[-1].write_text(f'<!doctype html><meta charset="utf-8">{"".join(parts)}', "utf-8")
        for file in written:
            console.print(escape(f"saved in {file}"), soft_wrap=True)

    def picture(self) -> "go.Figure | None":
        """A line for each job through what it set and what came of it; None without two to compare."""
        from gradpolicy.insight.report.figures import parallel_coordinates

        frame = self.frame()
        frame = frame[frame[self.heading].notna()]
        if len(frame) < 2 or not self.varied:
            return None
        settings = {key: frame[key].fillna("–").tolist() for key in self.varied}
        values = frame[self.heading].astype(float).tolist()
        return parallel_coordinates(settings, self.heading, values, lowest=self.mode == "min")


def collect(sweep_dir: Path) -> list[Result]:
    """Reads the results of a sweep's jobs, in the order of the jobs; one that is damaged counts as failed."""
    paths = [path for path in (sweep_dir / RESULTS).glob("*.json") if path.stem.isdecimal()]
    return [_read(path) for path in sorted(paths, key=lambda path: int(path.stem))]


def _read(path: Path) -> Result:
    try:
        return Result.load(path)
    except PolicyError as error:
        return Result(status="failed", error=str(error))


def _key_and_value(override: str) -> tuple[str, str]:
    key, given, value = override.partition("=")
    return key.lstrip("+"), value if given else "removed"


def _in_lines(key: str) -> str:
    """A key as the heading of a narrow column."""
    return escape(key.replace(".", ".\n"))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", header_style="bold")
