"""A report of one run, or of several beside each other: one HTML file that opens offline."""

import os
from collections.abc import Sequence
from pathlib import Path

from gradpolicy.insight.report.page import render
from gradpolicy.insight.report.reading import Run, looks_like_run, read_run

__all__ = ["REPORT", "is_report", "looks_like_run", "write"]

REPORT = "report.html"


def write(runs: Sequence[Path], output: Path) -> Path:
    """Writes the report of run directories; it reads nothing but these.

    What a directory lacks is named in the report. A report has at most 6 MB: of many runs, the last ones may
    appear in the comparison alone.

    Args:
        runs: Run directories.
        output: The file to write.

    Returns:
        The file.

    Raises:
        ValueError: If there are no runs.
        OSError: If the file cannot be written.
    """
    if not runs:
        raise ValueError("no runs to report")
    page = render(_read(list(dict.fromkeys(path.absolute() for path in map(Path, runs)))))
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f".{output.name}.part")
    # What is no text in a config or log becomes a question mark.
    part.write_text(page, encoding="utf-8", errors="replace")
    os.replace(part, output)
    return output


def is_report(path: Path) -> bool:
    """Whether a file is a report."""
    with path.open("rb") as file:
        return b"gradpolicy report</title>" in file.read(4096)


def _read(directories: Sequence[Path]) -> list[Run]:
    """Reads the runs, named after their directories: by as many parts of the path as tell them apart."""
    if len(directories) == 1:
        return [read_run(directories[0])]
    parts = 1
    while len({path.parts[-parts:] for path in directories}) < len(directories):
        parts += 1
    return [read_run(path, "/".join(path.parts[-parts:])) for path in directories]
