"""The report of one or several runs: one HTML file that opens offline."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gradpolicy.files import atomic_open
from gradpolicy.insight.run_files import REPORT

__all__ = ["REPORT", "is_report", "looks_like_run", "write", "write_report"]

# A run directory holds at least one of these.
MARKS = ("config.yaml", "result.json", "plan.json", "record.jsonl", "run.json", "audit.json", "csv")


def write(runs: Sequence[Path], output: Path) -> Path:
    """Write the report of run directories, from their files alone.

    Missing files are named in the report. With more than 40 runs, the last ones are
    only in the comparison.

    Args:
        runs: Run directories.
        output: The file to write.

    Returns:
        The file.

    Raises:
        ValueError: If there are no runs.
        OSError: If the file cannot be written.
    """
    # Plotting takes a while to import.
    from gradpolicy.insight.report.page import render
    from gradpolicy.insight.report.recorded_run import read_runs

    if not runs:
        raise ValueError("no runs to report")
    page = render(read_runs([Path(run).absolute() for run in runs]))
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Characters that cannot be encoded become question marks.
    with atomic_open(output, encoding="utf-8", errors="replace") as file:
        file.write(page)
    return output


def write_report(runs: Sequence[Path], output: Path, console: Console, *, names_it: bool = False) -> None:
    """Write the report of one run or of several; if that fails, print a warning.

    Args:
        runs: The directories of the runs.
        output: The file to write.
        console: The console.
        names_it: Print the path of the report.
    """
    try:
        write(runs, output)
    except Exception as error:
        text = " ".join(str(error).split())
        console.print(f"warning: no report: {type(error).__name__}: {text}", markup=False, soft_wrap=True)
        return
    if names_it:
        console.print(f"report {output.absolute()}", markup=False, highlight=False, soft_wrap=True)


def is_report(path: Path) -> bool:
    """Return True if a file is a report."""
    with path.open("rb") as file:
        return b"gradpolicy report</title>" in file.read(4096)


def looks_like_run(directory: Path) -> bool:
    """Return True if a directory holds at least one of the files that a run writes."""
    return any((directory / name).exists() for name in MARKS)
