"""Compares experiments over several seeds: ``python scripts/compare.py NAME data.data_dir=DIRECTORY``.

Writes a table of means and standard deviations as CSV and Markdown, and a picture. What was finished before
is not run again: a comparison that was broken off goes on where it stopped. Further ``key=value`` settings go
to every run, as on the command line of train.py.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # Ctrl-C while the rest is imported: nothing has begun, so there is nothing to say.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from comparisons.families import FAMILIES, Family
from comparisons.picture import draw
from comparisons.runs import Run, finish, runs_of
from comparisons.table import Row, make_rows, markdown, printed, write_csv
from gradpolicy.errors import PolicyError, unknown

TABLE = "table"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        PolicyError: For an unknown family.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(sorted(FAMILIES))}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for every run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument(
        "--out", type=Path, help="the folder for runs and table (default: outputs/compare/NAME)"
    )
    parser.add_argument("--only-table", action="store_true", help="train nothing: the table of what is there")
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.name not in FAMILIES:
        raise unknown("comparison", parsed.name, FAMILIES)
    return parsed


def finish_with_progress(runs: list[Run]) -> None:
    """Trains what is not done yet, under one bar for all."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # On the stream itself: that of `sys` changes while a run writes into its log.
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as progress:
        task = progress.add_task("", total=len(runs))

        def begin(run: Run) -> None:
            progress.update(
                task, completed=runs.index(run), description=f"{run.variant}, seed {run.seed}", refresh=True
            )

        finish(runs, begin)
        progress.update(task, completed=len(runs), description="done")


def save(family: Family, rows: list[Row], runs: list[Run], out: Path) -> list[Path]:
    """Writes table and picture.

    Returns:
        The files.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{TABLE}.{kind}" for kind in ("csv", "md", "png")]
    write_csv(rows, family.columns, files[0])
    files[1].write_text(markdown(rows, family.columns))
    draw(family, runs, files[2])
    return files


def main(arguments: list[str]) -> int:
    """Runs a comparison and shows its table."""
    console = Console()
    try:
        parsed = parse(arguments)
        family = FAMILIES[parsed.name]
        out = parsed.out or Path("outputs/compare") / parsed.name
        runs = list(runs_of(family, parsed.seeds, out, parsed.overrides))
        if not parsed.only_table:
            finish_with_progress(runs)
        rows = make_rows(family, runs)
    except PolicyError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False)
        return 2
    console.print(printed(family.title, rows, family.columns))
    for path in save(family, rows, runs, out):
        console.print(f"written to {path}", highlight=False)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
