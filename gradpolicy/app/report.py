"""Writes the report of one or several runs.

    gradpolicy report outputs/train/runs/DATE
    gradpolicy report outputs/train/multiruns/DATE/* --output sweep.html

A directory of run directories means all of these. The report is one HTML file, which opens offline.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

# Imported here, so that a missing package is reported before any work.
import gradpolicy.insight.report.page  # noqa: F401
from gradpolicy.checks import check_free
from gradpolicy.errors import PolicyError
from gradpolicy.insight.report import REPORT, is_report, looks_like_run, write


def main(arguments: Sequence[str]) -> int:
    """Run the program, and return its exit code.

    Raises:
        PolicyError: For invalid input.
    """
    options = make_parser().parse_args(arguments)
    runs = find_runs([Path(given).expanduser() for given in options.runs])
    output = Path(options.output).expanduser() if options.output else default_output(runs)
    check_free("--output", output, "report of gradpolicy", is_report)
    print(f"Saved in {write(runs, output)}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="gradpolicy report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or a directory of them")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"the file to write (default: {REPORT} in the run directory; of several, their common one)",
    )
    return parser


def find_runs(given: Sequence[Path]) -> list[Path]:
    """Return the run directories of the command line, each once.

    Raises:
        PolicyError: For a path that neither is nor contains a run directory.
    """
    found: list[Path] = []
    for path in given:
        if looks_like_run(path):
            found.append(path)
            continue
        below = sorted(each.parent for each in path.rglob("config.yaml") if each.parent.name != ".hydra")
        if not below:
            raise PolicyError(f"RUN: {path} is no run directory and no directory of them")
        found += below
    return list(dict.fromkeys(path.absolute() for path in found))


def default_output(runs: Sequence[Path]) -> Path:
    """Return the default path of the report."""
    if len(runs) == 1:
        return runs[0] / REPORT
    return Path(os.path.commonpath([run.parent for run in runs])) / REPORT
