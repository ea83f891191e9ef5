"""Reads checkpoints: runs nothing that is in them, and refuses damaged ones. Nothing else reads them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import lightning
import torch
from fsspec.utils import get_protocol
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gradpolicy.checkpoint_file import UnreadableError, check_file, check_kind, errors_named, load_file
from gradpolicy.distributed.shard_reader import entries
from gradpolicy.distributed.sharded_checkpoint import check_manifest, read_as_one, read_unsharded

KEY = "ckpt_path"
# The keys under which the saved state of a ModelCheckpoint has paths.
PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
WEIGHTS = "state_dict"
VERSION = "pytorch-lightning_version"
# The part of the run's config that a run which resumes from the checkpoint must share.
SETTINGS = "gradpolicy_settings"


class Checked(NamedTuple):
    """What the check of a checkpoint has found.

    Attributes:
        stamp: Sizes, times and inodes of its files. If it changes, the checkpoint was written again.
        infinite: The tensors that hold an infinite value, which a buffer may and a parameter may not.
    """

    stamp: tuple[Any, ...]
    infinite: tuple[str, ...]


# A checkpoint is checked once, however often a run reads it.
_checked: dict[Path, Checked] = {}


def check_checkpoint(path: Path, key: str = KEY) -> Checked:
    """Makes sure that a checkpoint is undamaged, that nothing in it could run, and that no weight is NaN.

    A checkpoint that another program wrote has no checksums: a warning says so.

    Args:
        path: A file, or a directory of shards.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If it is damaged, could run something, or holds NaN.
    """
    with errors_named(path, key):
        stamp, known = _stamp(path), _checked.get(path.absolute())
        if known is not None and known.stamp == stamp:
            return known
        weights = _check_directory(path) if path.is_dir() else _check_file(path)
        found = Checked(stamp, _infinite(weights))
    _checked[path.absolute()] = found
    return found


def read_checkpoint(path: Path, key: str = KEY) -> Mapping[str, Any]:
    """Reads a checkpoint; its tensors stay in the file until they are used. No code in it is run.

    Of a directory of shards, only what is not sharded is read.

    Args:
        path: The checkpoint.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If it is damaged, holds anything but tensors and plain values, or is no checkpoint of
            Lightning's.
    """
    check_checkpoint(path, key)
    with errors_named(path, key):
        return read_unsharded(path) if path.is_dir() else _with_weights(load_file(path, mmap=True))


def read_weights(path: Path, key: str = KEY) -> Mapping[str, Any]:
    """Reads the weights of a checkpoint, be it a file or a directory of shards.

    Args:
        path: The checkpoint.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: As :func:`read_checkpoint`.
    """
    check_checkpoint(path, key)
    with errors_named(path, key):
        return _with_weights(read_as_one(path) if path.is_dir() else load_file(path, mmap=True))[WEIGHTS]


def load_checkpoint(path: Path, map_location: Any = "cpu", *, mmap: bool = False) -> dict[str, Any]:
    """Reads all of a checkpoint, as if one process had written it.

    A file of weights alone gets what Lightning needs to test it.

    Args:
        path: A file, or a directory of shards.
        map_location: As that of ``torch.load``.
        mmap: Leave tensors in the file until they are used; not for files that may be written to meanwhile.

    Raises:
        PolicyError: As :func:`read_checkpoint`.
    """
    check_checkpoint(path)
    with errors_named(path, KEY):
        if path.is_dir():
            content: Any = read_as_one(path)
        else:
            content = load_file(path, map_location=map_location, mmap=mmap)
    return {VERSION: lightning.__version__, **content} if _weights(content) else content


def _weights(content: Any) -> Mapping[str, Any]:
    weights = content.get(WEIGHTS) if isinstance(content, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def _with_weights(content: Any) -> Mapping[str, Any]:
    if not isinstance(content, Mapping) or not isinstance(content.get(WEIGHTS), Mapping):
        raise UnreadableError(f"holds no {WEIGHTS!r} with tensors by name: it is no checkpoint of a run")
    return content


def _check_file(path: Path) -> Iterable[tuple[str, Any]]:
    if not check_file(path):
        _warn_unchecked(path)
    content = load_file(path, mmap=True)
    _check_paths(content)
    return _weights(content).items()


def _check_directory(path: Path) -> Iterator[tuple[str, Any]]:
    """Checks shard by shard, since all of them together may not fit into memory."""
    if not check_manifest(path):
        _warn_unchecked(path)
    _check_paths(read_unsharded(path))
    prefix = f"{WEIGHTS}."
    return ((name.removeprefix(prefix), value) for name, value in entries(path, prefix))


def _warn_unchecked(path: Path) -> None:
    rank_zero_warn(f"{path} was written without checksums: it cannot be told whether it is damaged")


def _infinite(weights: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """Names the tensors that hold infinite values.

    Raises:
        UnreadableError: If one holds NaN.
    """
    infinite: dict[str, None] = {}
    for name, value in weights:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.numel():
            extremes = _extremes(value.detach())
            if extremes.isnan().any():
                raise UnreadableError(f"holds NaN in {name[:120]}: no run can go on from it")
            if extremes.isinf().any():
                infinite[str(name)] = None
    return tuple(infinite)


def _extremes(tensor: Tensor) -> Tensor:
    """The smallest and the largest number; both are NaN where any is."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    dense = real.to_dense() if real.layout is not torch.strided else real
    # aminmax does not take numbers of one byte.
    return torch.stack(torch.aminmax(dense.float() if dense.itemsize == 1 else dense))


def _check_paths(content: Any) -> None:
    """Refuses a checkpoint by which Lightning would delete files elsewhere.

    Lightning's ModelCheckpoint deletes the checkpoints that its saved state names as outdated: those below
    its own directory, but without following ``..``, and any whose path has a protocol, such as ``local://``.

    Raises:
        UnreadableError: If such a path is named.
    """
    for named in named_checkpoints(content):
        if get_protocol(named) != "file" or ".." in PurePath(named).parts:
            raise UnreadableError(
                f"names {named[:120]!r} as a checkpoint of its run, which training would delete;"
                " its weights alone can be used: callbacks.initial_weights.path"
            )


def named_checkpoints(content: Any) -> list[str]:
    """The paths that the saved states of checkpoint callbacks hold."""
    states = content.get("callbacks") if isinstance(content, Mapping) else None
    found: list[Any] = []
    for state in states.values() if isinstance(states, Mapping) else ():
        if isinstance(state, Mapping):
            found += [state.get(name) for name in PATHS]
            best = state.get("best_k_models")
            found += list(best) if isinstance(best, Mapping) else []
    return [path for path in found if isinstance(path, str) and path]


def _stamp(path: Path) -> tuple[Any, ...]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        check_kind(file, KEY)
    return tuple(
        (file.name, status.st_ino, status.st_size, status.st_mtime_ns)
        for file, status in ((file, file.stat()) for file in files)
    )
