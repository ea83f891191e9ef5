"""The command ``gradpolicy checkpoint``: converts saved optimizers for plain torch."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gradpolicy.checkpoint_file import read_file
from gradpolicy.display import wide_console
from gradpolicy.errors import PolicyError
from gradpolicy.optim.checkpoint import dense
from gradpolicy.whole_file import written_whole

KEY = "checkpoint"


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit code.

    Args:
        arguments: The arguments after ``gradpolicy checkpoint``.

    Raises:
        PolicyError: For invalid input.
    """
    options = _parser().parse_args(arguments)
    path, out = Path(options.file), Path(options.out)
    if path.is_dir():
        raise PolicyError(f"{KEY}: {path} is a directory of shards, whose optimizers are dense already")
    if out.exists():
        raise PolicyError(f"{KEY}: {out} is there already; none is overwritten")
    content, found = _dense_inside(read_file(path, KEY))
    if not found:
        raise PolicyError(f"{KEY}: {path} holds no state_dict of an optimizer")
    try:
        with written_whole(out, "w+b") as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:
        raise PolicyError(f"{KEY}: {out} cannot be written: {error}") from error
    wide_console().print(
        f"wrote {out}: {found} optimizer{'s' if found > 1 else ''} as torch alone loads; "
        f"{path.stat().st_size:,} bytes became {out.stat().st_size:,}",
        highlight=False,
    )
    return 0


def _dense_inside(content: Any) -> tuple[Any, int]:
    """Return a checkpoint with dense states of all its optimizers, and their number."""
    if isinstance(content, Mapping) and {"state", "param_groups"} <= content.keys():
        return dense(dict(content)), 1
    if not isinstance(content, Mapping | list):
        return content, 0
    keys = list(content) if isinstance(content, Mapping) else range(len(content))
    parts = [_dense_inside(content[key]) for key in keys]
    changed = [part for part, _ in parts]
    found = sum(count for _, count in parts)
    if not found:
        return content, 0
    return (dict(zip(keys, changed, strict=True)) if isinstance(content, Mapping) else changed), found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradpolicy checkpoint", description="Checkpoints of optimizers (docs/resume.md)."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    each = actions.add_parser("dense", help="write FILE with optimizers in the form that plain torch loads")
    each.add_argument("file", metavar="FILE", help="a file of torch.save, Lightning or the Trainer")
    each.add_argument("--out", required=True, metavar="FILE", help="a new file")
    return parser
