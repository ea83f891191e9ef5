"""The command ``gradpolicy init``: writes a small project to start from."""

import argparse
import keyword
from collections.abc import Sequence
from pathlib import Path

from gradpolicy.errors import PolicyError, shown

STARTER = Path(__file__).parent / "starter"
# The package of the starter project, which is renamed after the directory.
PACKAGE = "my_project"
DESCRIPTION = """Write a small project: a model, data, two policies and a test.

gradpolicy init my_project
cd my_project && python train.py && python -m pytest
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``gradpolicy init``, and return its exit code.

    Raises:
        PolicyError: As :func:`write_project`.
    """
    parser = argparse.ArgumentParser(
        prog="gradpolicy init", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the project's directory, new or empty")
    directory = parser.parse_args(arguments).directory.expanduser()
    write_project(directory)
    print(f"Wrote {directory}; next:\n  cd {directory}\n  python train.py\nSee README.md for the next steps.")
    return 0


def write_project(directory: Path) -> None:
    """Write the project.

    Args:
        directory: The directory, whose name becomes that of the project's package.

    Raises:
        PolicyError: If the directory is not empty, or its name is not a valid package name.
    """
    name = directory.absolute().name.replace("-", "_")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise PolicyError(f"DIR: {shown(name)} cannot be the name of a package; use letters, digits and _")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PolicyError(f"DIR: {directory} is not empty; name a new directory")
    for source in sorted(STARTER.rglob("*")):
        if source.is_file() and source.suffix != ".pyc":
            target = directory / str(source.relative_to(STARTER)).replace(PACKAGE, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text("utf-8").replace(PACKAGE, name), "utf-8")
