"""Shows what each policy affects: `gradpolicy plan [--write-schedule FILE] [OVERRIDE ...]`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from gradpolicy.checks import check_free
from gradpolicy.launch import app
from gradpolicy.launch.run import SCHEDULE


def main(arguments: Sequence[str], config_dir: Path) -> int:
    """Run the program.

    Args:
        arguments: The command line.
        config_dir: The directory of configs.

    Returns:
        The exit code of the run that makes the plan.

    Raises:
        PolicyError: If the file of the schedule is there already.
    """
    parser = argparse.ArgumentParser(prog="gradpolicy plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--write-schedule", type=Path, metavar="FILE")
    options, words = parser.parse_known_args(arguments)
    if options.write_schedule is not None:
        check_free("--write-schedule", options.write_schedule, None, lambda path: False)
    token = SCHEDULE.set(options.write_schedule)
    try:
        return app.main(config_dir, [*words, "plan_only=true"])
    finally:
        SCHEDULE.reset(token)
