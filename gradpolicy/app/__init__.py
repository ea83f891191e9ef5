"""From the command line to a run: compose, check, plan, fit, test, report."""

from enum import IntEnum
from pathlib import Path

# The configs of the package.
CONFIGS = Path(__file__).resolve().parents[1] / "conf"


class Exit(IntEnum):
    """The exit codes of failures; those of invalid input have the code of their class."""

    FAILED = 1
    WRONG_INPUT = 2
    INTERRUPTED = 130
    TERMINATED = 143
