"""Finds the checkpoint to resume from or to test, and makes sure that it is whole and of this model."""

import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from gradpolicy.distributed.sharded_checkpoint import (
    find_whole,
    is_sharded_checkpoint,
    is_whole,
    read_unsharded,
    saved_shapes,
)
from gradpolicy.errors import PolicyError, nearest, shortened

KEY = "ckpt_path"
LAST = "last"
LAST_NAME = "last*.ckpt"


def find_checkpoint(ckpt_path: str | None, places: Iterable[Path]) -> Path | None:
    """Finds the checkpoint that `ckpt_path` names.

    Args:
        ckpt_path: None; a file; a run directory, which means the newest good one in it; or ``last``, which
            means the newest good one of all runs in the given places.
        places: Directories to look for ``last`` in; the first one that holds any decides.

    Raises:
        PolicyError: If there is none.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == LAST:
        places = list(places)
        for place in places:
            found = _newest_good(place, LAST_NAME)
            if found is not None:
                return found
        raise PolicyError(f"ckpt_path=last: no good checkpoint below {', '.join(map(str, places))}")
    path = Path(ckpt_path).expanduser()
    if path.is_dir() and not is_sharded_checkpoint(path):
        found = _newest_good(path, "*.ckpt")
        if found is None:
            raise PolicyError(f"ckpt_path: no good checkpoint in the directory {path}")
        return found
    if not path.exists():
        raise PolicyError(f"ckpt_path: {path} does not exist; {_near(path)}")
    return path


def read_checkpoint(path: Path, key: str = KEY) -> Mapping[str, Any]:
    """Reads a checkpoint; its tensors stay in the file until they are used. No code in it is run.

    Of a directory of shards only what is not sharded is read.

    Args:
        path: The checkpoint.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If it is damaged, holds anything but tensors and plain values, or is no checkpoint of
            Lightning's.
    """
    sharded = path.is_dir()
    try:
        if sharded:
            return read_unsharded(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        readable = sharded or zipfile.is_zipfile(path)
        reason = _first_line(error) if readable else "it is no checkpoint, or it is truncated"
        raise PolicyError(f"{key}: {path} cannot be read: {reason}") from error
    except Exception as error:
        # Bytes that are no checkpoint make torch's reader stumble in any way there is.
        raise PolicyError(f"{key}: {path} is truncated or damaged ({_first_line(error)})") from error
    if not isinstance(content, Mapping) or "state_dict" not in content:
        raise PolicyError(f"{key}: {path} holds no 'state_dict': it is no checkpoint of a run")
    return content


def check_fits(path: Path, model: nn.Module, key: str = KEY) -> None:
    """Checks that a checkpoint is of this model: the same names, the same shapes.

    Args:
        path: The checkpoint.
        model: The model.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If it is damaged, or of another model.
    """
    content = read_checkpoint(path, key)
    saved = saved_shapes(path) if path.is_dir() else _shapes(content["state_dict"])
    wanted = _shapes(model.state_dict())
    lacking, surplus = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    reshaped = [
        f"{name} is {saved[name]} there and {wanted[name]} here"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    differences = [
        *([f"it lacks {shortened(lacking)}"] if lacking else []),
        *([f"it holds {shortened(surplus)}, which this model has not"] if surplus else []),
        *reshaped[:2],
    ]
    if differences:
        raise PolicyError(f"{key}: {path} is of another model: {'; '.join(differences)}")


def _newest_good(place: Path, name: str) -> Path | None:
    """The newest checkpoint below a place that can be read: a file, or a directory of shards."""
    found = {*place.rglob(name), *find_whole(place, name)}
    for path in sorted(found, key=lambda each: each.stat().st_mtime, reverse=True):
        try:
            if path.is_dir() and not is_whole(path):
                raise PolicyError(f"ckpt_path: {path} was not finished")
            read_checkpoint(path)
        except PolicyError as error:
            rank_zero_warn(f"passed over: {error}")
            if name != LAST_NAME:
                continue
            # Rather another checkpoint of the same run than one of another run.
            beside = _newest_good(path.parent, "*.ckpt")
            if beside is None:
                continue
            return beside
        return path
    return None


def _near(path: Path) -> str:
    """Names the checkpoints beside the one that does not exist."""
    if not path.parent.is_dir():
        return f"there is no directory {path.parent} either; ckpt_path=last finds the newest"
    found = [candidate.name for candidate in path.parent.glob("*.ckpt")]
    return nearest(path.name, found, count=2) or "ckpt_path=last finds the newest"


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
