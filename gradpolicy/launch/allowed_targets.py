"""The packages that the person who runs the program allows configs to name.

That person names them on the command line, in a file beside ``train.py``, or in an environment variable. A
config cannot allow anything: it may come from somebody else.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from gradpolicy.errors import PolicyError, shown

KEY = "allowed_targets"
FILE = "allowed_targets.txt"
VARIABLE = "GRADPOLICY_ALLOWED_TARGETS"


def trusted_packages(overrides: Sequence[str], beside: Path) -> tuple[str, ...]:
    """List the packages that this person allows configs to name.

    Args:
        overrides: The command line's.
        beside: The directory of ``train.py``, where the file may lie: a package a line, ``#`` for comments.

    Raises:
        PolicyError: If one is no name of a package.
    """
    file = beside / FILE
    lines = file.read_text().splitlines() if file.is_file() else []
    in_file = [line.partition("#")[0].strip() for line in lines]
    in_environment = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    return tuple(
        dict.fromkeys(
            [
                *_checked(KEY, _on_command_line(overrides)),
                *_checked(str(file), filter(None, in_file)),
                *_checked(VARIABLE, filter(None, in_environment)),
            ]
        )
    )


def _on_command_line(overrides: Sequence[str]) -> list[Any]:
    """Return the packages that the command line allows."""
    values = [override.value() for override in parsed(overrides) if override.key_or_group == KEY]
    named: Any = values[-1] if values else []
    return list(named) if isinstance(named, list) else [named]


def check_not_from_config(config: DictConfig, overrides: Sequence[str]) -> None:
    """Make sure that no config file allows packages.

    Args:
        config: A composed job.
        overrides: Those of the command line, without those that a config adds for a sweep.

    Raises:
        PolicyError: If the job's list is not the command line's.
    """
    listed = OmegaConf.to_container(config, resolve=False).get(KEY) or []  # type: ignore[union-attr]
    listed = [listed] if isinstance(listed, str) else listed
    if listed != _on_command_line(overrides):
        raise PolicyError(
            f"{KEY}: a config cannot allow targets, only the person who runs it can: by {KEY}=[…] on the "
            f"command line, in {FILE} beside train.py, or by {VARIABLE}"
        )


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse the overrides of a command line."""
    return OverridesParser.create().parse_overrides(list(overrides))


def _checked(source: str, names: Iterable[object]) -> list[str]:
    found = []
    for name in names:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise PolicyError(f"{source}: must be names of packages, such as my_package; got {shown(name)}")
        found.append(name)
    return found
