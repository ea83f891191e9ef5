"""Compares experiments over several seeds: ``python scripts/compare.py NAME data.data_dir=DIRECTORY``.

Writes means and sample standard deviations as CSV and Markdown, and a picture. Finished runs are not
repeated: an interrupted comparison continues where it stopped. Further ``key=value`` settings apply to every
run, as on the command line of train.py. ``scripts/comparisons.yaml`` lists the comparisons.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from gradpolicy.app.launch import main as train_main
from gradpolicy.app.processes import quoted
from gradpolicy.errors import PolicyError, unknown
from gradpolicy.insight.run_files import RESULT, Result

CONF = Path(__file__).parents[1] / "conf"
# Runs print nothing; the progress of the comparison is shown instead.
QUIET = ("extras.plan=false", "trainer.enable_progress_bar=false", "++callbacks.progress_bar=null")


@dataclass(frozen=True)
class Comparison:
    """Runs to compare, as scripts/comparisons.yaml lists them.

    Attributes:
        title: The title of the table.
        rows: The overrides of each row, by its name.
        columns: Heading, metric, factor and digits of each column.
        curve: The metric of the picture, and its label.
        base: The overrides of a run from which the rows of the same seed start.
    """

    title: str
    rows: Mapping[str, Sequence[str]]
    columns: Sequence[Mapping[str, Any]]
    curve: Mapping[str, str]
    base: Sequence[str] = ()


LISTED = yaml.safe_load(Path(__file__).with_name("comparisons.yaml").read_text())["comparisons"]
COMPARISONS = {name: Comparison(**fields) for name, fields in LISTED.items()}


@dataclass(frozen=True)
class Run:
    """A row with a seed.

    Attributes:
        row: The name of the row.
        seed: The seed.
        overrides: The overrides of the config.
        directory: The run directory.
    """

    row: str
    seed: int
    overrides: tuple[str, ...]
    directory: Path

    @property
    def result(self) -> Result | None:
        """The result; None if the run is not finished, or had other overrides."""
        try:
            result = Result.load(self.directory / RESULT)
        except (PolicyError, FileNotFoundError):
            return None
        same = set(result.overrides) == set(self.overrides)
        return result if result.status == "completed" and same else None

    @property
    def curves(self) -> pd.DataFrame:
        """The metrics of the newest CSV log, by step; empty without one."""
        logs = sorted(self.directory.glob("csv/*/metrics.csv"), key=lambda path: path.stat().st_mtime)
        return pd.read_csv(logs[-1], index_col="step") if logs else pd.DataFrame()


def runs_of(
    comparison: Comparison, seeds: Sequence[int], out: Path, overrides: Sequence[str] = ()
) -> Iterator[Run]:
    """Yield the runs of a comparison, the base run of each seed first."""
    for seed in seeds:
        base = (out / "base" / f"seed-{seed}").absolute()
        first = {"base": comparison.base} if comparison.base else {}
        for row, own in {**first, **comparison.rows}.items():
            lines = [line.replace("{base}", str(base)) for line in own]
            directory = (out / row / f"seed-{seed}").absolute()
            yield Run(row, seed, (*lines, f"seed={seed}", *QUIET, *overrides), directory)


def train(run: Run) -> None:
    """Train in this process; the output goes to a log beside the run directory.

    Raises:
        PolicyError: If the run fails.
    """
    run.directory.mkdir(parents=True, exist_ok=True)
    log = run.directory.with_suffix(".log")
    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        code = train_main(CONF, [*run.overrides, f"hydra.run.dir={quoted(str(run.directory))}"])
    if code:
        errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
        cause = errors[-1].removeprefix("error: ") if errors else f"ended with code {code}"
        raise PolicyError(f"{run.row} with seed {run.seed}: {cause} (see {log})")


def table_of(comparison: Comparison, runs: Sequence[Run]) -> pd.DataFrame:
    """Return mean, standard deviation and number of seeds of each row, over its finished runs.

    Raises:
        PolicyError: If no run is finished.
    """
    finished = [(run.row, run.result.metrics) for run in runs if run.result is not None]
    if not finished:
        raise PolicyError("none of the runs is finished")
    metrics = pd.DataFrame([metrics for _, metrics in finished], index=[row for row, _ in finished])
    values = pd.DataFrame(
        {
            column["heading"]: metrics.get(column["metric"], pd.Series(index=metrics.index, dtype=float))
            * column.get("factor", 1.0)
            for column in comparison.columns
        }
    )
    grouped = values.groupby(level=0)
    table = pd.concat({"mean": grouped.mean(), "spread": grouped.std()}, axis=1)
    table[("seeds", "")] = grouped.size()
    return table.reindex([row for row in comparison.rows if row in table.index])


def markdown(comparison: Comparison, table: pd.DataFrame) -> str:
    """Return the table as Markdown."""
    headings = [column["heading"] for column in comparison.columns]
    lines = [["", *headings, "seeds"], ["---", *["---:"] * (len(headings) + 1)]]
    for row, numbers in table.iterrows():
        cells = []
        for column in comparison.columns:
            mean, spread = (numbers[kind, column["heading"]] for kind in ("mean", "spread"))
            digits = column["digits"]
            around = "" if pd.isna(spread) else f" ± {spread:.{digits}f}"
            cells.append("–" if pd.isna(mean) else f"{mean:.{digits}f}{around}")
        lines.append([str(row), *cells, str(int(numbers["seeds", ""]))])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def band(curves: Sequence[pd.Series]) -> pd.DataFrame:
    """Return mean, minimum and maximum at the steps that all curves have."""
    joined = pd.concat(curves, axis=1, join="inner").sort_index()
    return joined.agg(["mean", "min", "max"], axis=1)


def draw(comparison: Comparison, runs: Sequence[Run], path: Path) -> None:
    """Draw the curve of each row: the mean over the seeds, with their range as a band."""
    metric = comparison.curve["metric"]
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for row in comparison.rows:
        finished = [run.curves for run in runs if run.row == row and run.result is not None]
        curves = [curve[metric].dropna() for curve in finished if metric in curve]
        if curves:
            values = band(curves)
            (line,) = axes.plot(values["mean"], marker="o", markersize=2.5, linewidth=1.2, label=row)
            axes.fill_between(values.index, values["min"], values["max"], color=line.get_color(), alpha=0.15)
    axes.set_xlabel("training step")
    axes.set_ylabel(comparison.curve["label"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line.

    Raises:
        PolicyError: If there is no such comparison.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(sorted(COMPARISONS))}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for every run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument(
        "--out", type=Path, help="the folder for runs and table (default: outputs/compare/NAME)"
    )
    parser.add_argument("--only-table", action="store_true", help="train nothing; show the finished runs")
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.name not in COMPARISONS:
        raise unknown("comparison", parsed.name, COMPARISONS)
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Run a comparison and show its table; return 2 after wrong input or a failed run."""
    try:
        parsed = parse(arguments)
        comparison = COMPARISONS[parsed.name]
        out = parsed.out or Path("outputs/compare") / parsed.name
        runs = list(runs_of(comparison, parsed.seeds, out, parsed.overrides))
        missing = [] if parsed.only_table else [run for run in runs if run.result is None]
        # On the stream itself, since a run redirects `sys.stderr` to its log.
        for run in track(missing, "runs", console=Console(file=sys.stderr)):
            train(run)
        table = table_of(comparison, runs)
    except PolicyError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(comparison, table)
    print(f"{comparison.title}\n\n{text}")
    table.to_csv(out / "table.csv", header=[", ".join(filter(None, name)) for name in table])
    (out / "table.md").write_text(text)
    draw(comparison, runs, out / "table.png")
    for name in ("table.csv", "table.md", "table.png"):
        print(f"written to {out / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
