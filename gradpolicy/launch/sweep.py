"""A sweep's summary: one table of what each job set and what came of it, the best one marked."""

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradpolicy.launch.report import Result

RESULTS = "results"
SUMMARY = "summary.csv"


def collect(sweep_dir: Path) -> list[Result]:
    """Reads the results of a sweep's jobs, in the order of the jobs."""
    paths = sorted((sweep_dir / RESULTS).glob("*.json"), key=lambda path: int(path.stem))
    return [Result.load(path) for path in paths]


def best_of(results: Sequence[Result], mode: str) -> int | None:
    """The place of the best result; None where no job got so far."""
    valued = [index for index, result in enumerate(results) if _is_number(result.optimized)]
    if not valued:
        return None
    choose = min if mode == "min" else max
    return choose(valued, key=lambda index: results[index].optimized or 0.0)


def summarize(
    results: Sequence[Result], metric: str | None, mode: str, console: Console, path: Path | None = None
) -> None:
    """Prints the table and writes it as CSV.

    Args:
        results: The results of the jobs.
        metric: The metric that is compared.
        mode: ``"min"`` or ``"max"``: which value is the best.
        console: Where to print.
        path: Where the CSV goes.
    """
    best = best_of(results, mode)
    common = set.intersection(*(set(result.overrides) for result in results)) if len(results) > 1 else set()
    heading = metric or "metric"
    table = Table(title="Sweep", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("job", justify="right")
    table.add_column("overrides", overflow="fold")
    table.add_column(heading, justify="right")
    table.add_column("best", justify="center")
    for index, result in enumerate(results):
        value = f"{result.optimized:.6g}" if _is_number(result.optimized) else result.error or "–"
        style = "bold green" if index == best else "red" if result.status == "failed" else ""
        mark = "*" if index == best else ""
        own = " ".join(line for line in result.overrides if line not in common)
        # Brackets are lists here, not rich's markup.
        table.add_row(str(index), escape(own) or "–", escape(value), mark, style=style)
    console.print(table)
    if common:
        console.print(escape(f"all with {' '.join(sorted(common))}"), highlight=False)
    if path is not None:
        _write(results, heading, best, path)
        console.print(escape(f"saved in {path}"), soft_wrap=True)


def _write(results: Sequence[Result], heading: str, best: int | None, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["job", "overrides", heading, "best", "status", "error", "directory"])
        for index, result in enumerate(results):
            writer.writerow(
                [
                    index,
                    " ".join(result.overrides),
                    result.optimized,
                    index == best,
                    result.status,
                    result.error,
                    result.directory,
                ]
            )


def _is_number(value: float | None) -> bool:
    return value is not None and value == value
