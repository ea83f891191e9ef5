"""Writes the report at the end of a run or a sweep, which goes on if that fails."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


def write_report(runs: Sequence[Path], output: Path, console: Console, *, names_it: bool = False) -> None:
    """Writes the report of one run or of several; if that fails, a line says so, and the run goes on.

    Args:
        runs: The directories of the runs.
        output: Where the report goes.
        console: Where to print.
        names_it: Whether a line says where the report is.
    """
    # Plotting takes a while to import.
    from gradpolicy.insight.report import write

    try:
        write(runs, output)
    except Exception as error:
        text = " ".join(str(error).split())
        console.print(f"warning: no report: {type(error).__name__}: {text}", markup=False, soft_wrap=True)
        return
    if names_it:
        console.print(f"report {output.absolute()}", markup=False, highlight=False, soft_wrap=True)
