"""Shows what each policy affects: `gradpolicy plan [OVERRIDE ...]`."""

from collections.abc import Sequence
from pathlib import Path

from gradpolicy.launch import app


def main(arguments: Sequence[str], config_dir: Path) -> int:
    """Run the program, and return the exit code of the run that makes the plan."""
    return app.main(config_dir, [*arguments, "plan_only=true"])
