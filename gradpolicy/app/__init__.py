"""From the command line to a run: compose, check, plan, fit, test, report."""

from pathlib import Path

# The configs of the package.
CONFIGS = Path(__file__).resolve().parents[1] / "conf"
