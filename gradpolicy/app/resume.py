"""Resumes a run: `gradpolicy resume [RUN] [OVERRIDE ...]`."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from gradpolicy.app.launch import main as train
from gradpolicy.app.processes import quoted
from gradpolicy.errors import PolicyError
from gradpolicy.train.lightning.runs import LAST, RunRecord, find_checkpoint, run_of


def main(arguments: Sequence[str], config_dir: Path) -> int:
    """Run the program.

    Args:
        arguments: The command line.
        config_dir: The directory of configs.

    Returns:
        The exit code of the run.

    Raises:
        PolicyError: If there is no such run.
    """
    parser = argparse.ArgumentParser(
        prog="gradpolicy resume", description="Resumes a run, with its original command line."
    )
    parser.add_argument(
        "words", nargs="*", metavar="RUN, OVERRIDE", help="its directory; overrides to change"
    )
    words = parser.parse_args(arguments).words
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise PolicyError(f"resume: takes one directory of a run, got {', '.join(names)}")
    run, command = _run(Path(names[0]) if names else None)
    return train(
        config_dir, [*command, *(w for w in words if "=" in w), f"ckpt_path={quoted(str(run.absolute()))}"]
    )


def _run(directory: Path | None) -> tuple[Path, list[str]]:
    """Return a run, by default the newest, and its command line; change to its working directory.

    Raises:
        PolicyError: If there is none.
    """
    if directory is not None and not directory.is_dir():
        raise PolicyError(f"resume: {directory} is no directory of a run")
    checkpoint = find_checkpoint(LAST if directory is None else str(directory), Path("outputs"))
    run = None if checkpoint is None else run_of(checkpoint)
    record = None if run is None else RunRecord.load(run)
    if run is None or record is None:
        raise PolicyError(f"resume: {directory} is no directory of a run")
    run = run.absolute()
    if Path(record.started_in).is_dir():
        os.chdir(record.started_in)
    return run, [word for word in record.command if not word.startswith("ckpt_path=")]
