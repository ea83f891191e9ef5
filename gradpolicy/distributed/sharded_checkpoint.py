"""Sharded checkpoints: directories into which every rank writes its shards, complete or absent.

``torch.distributed.checkpoint.save`` writes into a temporary folder beside the checkpoint. When all ranks are
done, a manifest with the checksums of all files is written, which marks the folder as whole, and the folder
is renamed. A run that is killed at any moment leaves a whole checkpoint: the former one, or the new one,
perhaps still under its temporary name.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from gradpolicy.checkpoint_file import load_file, save_file
from gradpolicy.distributed import manifest
from gradpolicy.distributed.shard_metadata import read_metadata
from gradpolicy.distributed.shard_reader import load_all
from gradpolicy.tensors.sharding import shard_like

# The manifest. It is written last: a directory without it was not finished.
MARKER = "whole"
# What is not sharded, in the file that Lightning reads it from.
UNSHARDED = "meta.pt"
_METADATA = ".metadata"
_BEING_WRITTEN, _FORMER = "parts", "former"


def save_whole(sharded: dict[str, Any], unsharded: Any, path: Path) -> None:
    """Saves a checkpoint; the path holds the former one until all of the new one is there.

    Every rank calls this.

    Args:
        sharded: Tensors, DTensors and plain values, for ``torch.distributed.checkpoint``.
        unsharded: What the first rank saves with ``torch.save``.
        path: The directory that is made, the same on every rank.

    Raises:
        OSError: On every rank, if one could not write: with that rank, and the checkpoint that is left.
    """
    parts = _beside(path, _BEING_WRITTEN)
    _together(lambda: _make_room(parts), path, first_rank_only=True)
    own: manifest.Sums = {}

    def save_own() -> None:
        save_shards(sharded, storage_writer=FileSystemWriter(parts, overwrite=True))
        rank = dist.get_rank() if dist.is_initialized() else 0
        own.update(manifest.sums(parts.glob(f"__{rank}_*")))

    _together(save_own, path)
    shards = {name: told for each in _of_every_rank(own) for name, told in each.items()}
    _together(lambda: _finish(parts, unsharded, path, shards), path, first_rank_only=True)


def is_whole(path: Path) -> bool:
    """Whether a directory is a checkpoint that :func:`save_whole` has finished."""
    return (path / MARKER).is_file() and (path / _METADATA).is_file()


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether this is a directory of ``torch.distributed.checkpoint``, whoever wrote it."""
    return (path / _METADATA).is_file()


def find_whole(directory: Path, name: str) -> Iterator[Path]:
    """Finds whole checkpoints below a directory, also those that were not renamed before the run was killed.

    Args:
        directory: Where to look.
        name: Glob on the name of the checkpoint.
    """
    for pattern in (name, *(_beside(Path(name), suffix).name for suffix in (_BEING_WRITTEN, _FORMER))):
        yield from (path for path in directory.rglob(pattern) if is_whole(path))


def remove_whole(path: Path) -> None:
    """Deletes a checkpoint. If the run is killed meanwhile, what is left is not taken for a whole one."""
    if path.is_dir():
        (path / MARKER).unlink(missing_ok=True)
    _discard(path)


def saved_shapes(path: Path, part: str = "state_dict") -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that a directory holds below a key, by their names without the key."""
    saved = read_metadata(path / _METADATA).state_dict_metadata
    return {
        name.removeprefix(f"{part}."): tuple(entry.size)
        for name, entry in saved.items()
        if name.startswith(f"{part}.") and isinstance(entry, TensorStorageMetadata)
    }


def has_key(path: Path, key: str) -> bool:
    """Whether a directory holds anything below a key, such as ``"optimizer_0.state"``."""
    saved = read_metadata(path / _METADATA).state_dict_metadata
    return any(name.startswith(f"{key}.") for name in saved)


def read_unsharded(path: Path) -> dict[str, Any]:
    """What the first rank saved beside the shards; nothing if torch alone wrote the directory."""
    return load_file(path / UNSHARDED) if (path / UNSHARDED).is_file() else {}


def check_manifest(path: Path) -> bool:
    """Compares a directory with its manifest.

    Returns:
        Whether there is one: only :func:`save_whole` writes it.

    Raises:
        UnreadableError: If a file is absent or damaged.
    """
    written = path / MARKER
    if not written.is_file() or not written.stat().st_size:
        return False
    manifest.check(path, written)
    return True


def read_as_one(path: Path) -> dict[str, Any]:
    """Reads a directory as the checkpoint that one process would have written, without process group.

    Optimizer states, saved by parameter name as ``optimizer_0``, ``optimizer_1`` ..., become the list
    ``optimizer_states``, by parameter number.

    Args:
        path: A directory of Lightning's; it must fit into this process's memory.
    """
    content = load_all(path)
    numbers = sorted(int(key.removeprefix("optimizer_")) for key in content if key.startswith("optimizer_"))
    states = [by_number(content.pop(f"optimizer_{number}")) for number in numbers]
    return {**read_unsharded(path), **content, "optimizer_states": states}


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict with parameters by number, as torch's own, instead of by name.

    Example:
        >>> by_number({"state": {"b": {"step": 1}}, "param_groups": [{"params": ["a", "b"], "lr": 0.1}]})
        {'state': {1: {'step': 1}}, 'param_groups': [{'params': [0, 1], 'lr': 0.1}]}
    """
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [
        {**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]
    ]
    return {
        "state": {number[name]: entry for name, entry in state.get("state", {}).items()},
        "param_groups": groups,
    }


def cut_as(state: Mapping[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """Shards an unsharded optimizer's state_dict as its parameters are sharded.

    Args:
        state: The whole state by parameter number, the same on every rank.
        parameters: The parameters in the order of the optimizer's groups; DTensors or plain.

    Returns:
        The state in which every tensor of its parameter's shape is sharded as the parameter is.
    """

    def cut(value: Any, parameter: Tensor) -> Any:
        matches = isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
        return shard_like(value, parameter) if matches else value

    entries = {
        number: {key: cut(value, parameters[number]) for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}


def _finish(parts: Path, unsharded: Any, path: Path, shards: manifest.Sums) -> None:
    with (parts / UNSHARDED).open("wb") as file:
        save_file(unsharded, file)
        file.flush()
        os.fsync(file.fileno())
    files = {**shards, **manifest.sums([parts / _METADATA, parts / UNSHARDED])}
    with (parts / MARKER).open("w") as text:
        text.write(manifest.as_text(files))
        text.flush()
        os.fsync(text.fileno())
    sync_folder(parts)
    put_in_place(parts, path)


def put_in_place(parts: Path, path: Path) -> None:
    """Renames a finished folder, in place of the former checkpoint.

    Not every file system can swap two directories at once. If the run is killed between the two renames, both
    checkpoints are whole under their temporary names, where :func:`find_whole` finds them.
    """
    former = _beside(path, _FORMER)
    if path.exists():
        _discard(former)
        os.rename(path, former)
    os.rename(parts, path)
    sync_folder(path.parent)
    remove_whole(former)


def _make_room(parts: Path) -> None:
    remove_whole(parts)
    parts.mkdir(parents=True)


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def sync_folder(folder: Path) -> None:
    """Writes a folder's list of names to the disk, so that it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _together(action: Callable[[], Any], path: Path, *, first_rank_only: bool = False) -> None:
    """Does something on every rank, waits for all, and raises on all if it failed on any."""
    failure: BaseException | None = None
    try:
        if not first_rank_only or not dist.is_initialized() or dist.get_rank() == 0:
            action()
    except (OSError, RuntimeError, CheckpointException) as error:
        failure = error
    reasons = _of_every_rank({} if failure is None else _reasons(failure))
    failed = {rank: reason for told in reasons for rank, reason in told.items()}
    if failed:
        rank, (number, text) = min(failed.items())
        left = (
            f"the former {path.name} is whole: make room and resume from it (ckpt_path=last)"
            if is_whole(path)
            else f"there is no former {path.name}"
        )
        raise OSError(number, f"could not save {path}: rank {rank}: {text}; {left}") from failure


def _of_every_rank(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _reasons(error: BaseException) -> dict[int, tuple[int, str]]:
    """What failed on which rank: the error number of the operating system, if there is one, and a text."""
    if isinstance(error, CheckpointException):
        return {rank: _reason(failure) for rank, (failure, _) in error.failures.items()}
    return {dist.get_rank() if dist.is_initialized() else 0: _reason(error)}


def _reason(error: BaseException) -> tuple[int, str]:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError) and cause.errno is not None:
        return cause.errno, os.strerror(cause.errno)
    return errno.EIO, (str(error).splitlines() or [type(error).__name__])[0]
