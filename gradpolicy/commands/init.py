"""Writes a small project to begin with: a model, data, two policies and a test.

gradpolicy init my_project
cd my_project && python train.py && python -m pytest
"""

import argparse
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

from gradpolicy.errors import PolicyError, brief, shown

STARTER = Path(__file__).parent / "starter"
# The package of the starter project, which gets the name of the directory.
PACKAGE = "my_project"
WRONG_INPUT = 2


def main(arguments: Sequence[str]) -> int:
    """Runs the program and gives its exit code: 0, or 2 for wrong input."""
    parser = argparse.ArgumentParser(
        prog="gradpolicy init", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the project's directory, new or empty")
    directory = parser.parse_args(arguments).directory.expanduser()
    try:
        write_project(directory)
    except PolicyError as error:
        print(f"error: {brief(str(error), most=500)}", file=sys.stderr)
        return WRONG_INPUT
    print(f"Wrote {directory}; next:\n  cd {directory}\n  python train.py\nREADME.md says how to go on.")
    return 0


def write_project(directory: Path) -> None:
    """Writes the project.

    Args:
        directory: Where it goes. Its name becomes that of the project's package.

    Raises:
        PolicyError: If the directory holds something, cannot be written to, or has a name that no package can
            have.
    """
    name = directory.absolute().name.replace("-", "_")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise PolicyError(f"DIR: {shown(name)} cannot be the name of a package; use letters, digits and _")
    if name in (*sys.stdlib_module_names, "conf", "gradpolicy", "lightning", "tests", "torch", "train"):
        raise PolicyError(f"DIR: {shown(name)} is the name of another package; choose another")
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise PolicyError(f"DIR: {directory} is not empty; name a new directory")
        for source in sorted(STARTER.rglob("*")):
            if source.is_file() and source.suffix != ".pyc":
                target = directory / str(source.relative_to(STARTER)).replace(PACKAGE, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(source.read_text("utf-8").replace(PACKAGE, name), "utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise PolicyError(f"DIR: {directory} cannot be written: {reason}") from error
