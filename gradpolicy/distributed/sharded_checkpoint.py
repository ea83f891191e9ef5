"""Sharded checkpoints: directories into which every rank writes its shards, completely or not at all.

``torch.distributed.checkpoint.save`` writes into a temporary folder beside the checkpoint. When all ranks are
done, a manifest with the checksums of all files is written, which marks the folder as complete, and the
folder is renamed. A run that is killed at any moment leaves a complete checkpoint: the previous one, or the
new one, possibly under its temporary name.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from gradpolicy.checkpoint_file import UnreadableError, could_not_save, load_file
from gradpolicy.distributed.agreement import of_every_rank
from gradpolicy.distributed.shard_reader import load_all, read_metadata
from gradpolicy.optim.checkpoint import dense
from gradpolicy.tensors.sharding import shard_like
from gradpolicy.whole_file import sync_folder, write_text, written_whole

# The manifest. It is written last: a directory without it was not finished.
MARKER = "whole"
# The unsharded part, in the file from which Lightning reads it.
UNSHARDED = "meta.pt"
_METADATA = ".metadata"
_BEING_WRITTEN, _FORMER = "parts", "former"
_BLOCK = 1 << 20

# ---- writing


def save_whole(sharded: dict[str, Any], unsharded: Any, path: Path) -> None:
    """Save a checkpoint; the path has the previous one until the new one is complete.

    Every rank calls this.

    Args:
        sharded: Tensors, DTensors and plain values, for ``torch.distributed.checkpoint``.
        unsharded: The values that the first rank saves with ``torch.save``.
        path: The directory to create, the same on every rank.

    Raises:
        OSError: On every rank, if one could not write; names that rank and the remaining checkpoint.
    """
    parts, rank = _beside(path, _BEING_WRITTEN), dist.get_rank() if dist.is_initialized() else 0
    with _together(path, rank):
        if rank == 0:
            remove_whole(parts)
            parts.mkdir(parents=True)
    own: dict[str, list[int]] = {}
    with _together(path, rank):
        save_shards(sharded, storage_writer=FileSystemWriter(parts, overwrite=True))
        own = _sums(parts.glob(f"__{rank}_*"))
    shards = {name: size_and_sum for each in of_every_rank(own) for name, size_and_sum in each.items()}
    with _together(path, rank):
        if rank == 0:
            with written_whole(parts / UNSHARDED, "w+b") as file:
                torch.save(unsharded, file)
            files = {**shards, **_sums([parts / _METADATA, parts / UNSHARDED])}
            write_text(parts / MARKER, _manifest(files))
            put_in_place(parts, path)


def put_in_place(parts: Path, path: Path) -> None:
    """Rename a finished file or folder, replacing the previous checkpoint.

    Not every file system can swap two directories atomically. If the run is killed between the two renames,
    both checkpoints are complete under their temporary names, where :func:`find_whole` finds them.
    """
    former = _beside(path, _FORMER)
    if path.exists():
        _discard(former)
        os.rename(path, former)
    os.rename(parts, path)
    sync_folder(path.parent)
    remove_whole(former)


def remove_whole(path: Path) -> None:
    """Delete a checkpoint. If the run is killed meanwhile, the rest is not considered complete."""
    if path.is_dir():
        (path / MARKER).unlink(missing_ok=True)
    _discard(path)


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


@contextmanager
def _together(path: Path, rank: int) -> Iterator[None]:
    """Wait for all ranks after a block; raise an error on all if it failed on any."""
    failure: BaseException | None = None
    try:
        yield
    except CheckpointException as error:
        # Every rank has the errors of all ranks.
        failure, _ = error.failures.get(rank, (None, None))
    except (OSError, RuntimeError) as error:
        failure = error
    found = None if failure is None else could_not_save(path, failure, f"rank {rank}: ")
    for each in of_every_rank(found):
        if each is not None:
            raise each from failure


# ---- finding


def is_whole(path: Path) -> bool:
    """Return True for a directory that :func:`save_whole` has finished."""
    return (path / MARKER).is_file() and (path / _METADATA).is_file()


def is_sharded_checkpoint(path: Path) -> bool:
    """Return True for a directory of ``torch.distributed.checkpoint``, whatever program wrote it."""
    return (path / _METADATA).is_file()


def find_whole(directory: Path, name: str) -> Iterator[Path]:
    """Return the complete checkpoints below a directory, including ones that were not renamed before a kill.

    Args:
        directory: The directory.
        name: A glob on the checkpoint's name.
    """
    for pattern in (name, *(_beside(Path(name), suffix).name for suffix in (_BEING_WRITTEN, _FORMER))):
        yield from (path for path in directory.rglob(pattern) if is_whole(path))


# ---- the manifest: each file with its size and CRC-32


def check_manifest(path: Path) -> bool:
    """Compare a directory with its manifest.

    It detects damage, not the author: whoever can write shards can write their checksums.

    Returns:
        True if there is a manifest, which only :func:`save_whole` writes.

    Raises:
        UnreadableError: If a file is missing or damaged.
    """
    manifest = path / MARKER
    if not manifest.is_file():
        return False
    written = manifest.read_bytes()
    try:
        files = dict(json.loads(written)["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError(f"is damaged: {MARKER} is no list of its files") from error
    for name, size_and_sum in files.items():
        if Path(name).name != name or not (path / name).is_file():
            raise UnreadableError(f"is damaged: it has no file {name[:80]!r}")
        if _sums([path / name])[name] != size_and_sum:
            raise UnreadableError(f"is damaged: {name} differs from its checksum")
    if _manifest(files).encode() != written:
        raise UnreadableError(f"is damaged: {MARKER} was changed")
    return True


def _manifest(files: Mapping[str, list[int]]) -> str:
    """Return the manifest's text in a canonical form, so that any changed bit is detected."""
    return json.dumps({"files": {name: files[name] for name in sorted(files)}}, indent=1) + "\n"


def _sums(paths: Iterable[Path]) -> dict[str, list[int]]:
    found = {}
    for path in paths:
        checksum = 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                checksum = zlib.crc32(block, checksum)
        found[path.name] = [path.stat().st_size, checksum]
    return found


# ---- reading


def saved_shapes(path: Path, part: str = "state_dict") -> dict[str, tuple[int, ...]]:
    """Return the shapes of a directory's tensors below a key, by their names without the key."""
    saved = read_metadata(path / _METADATA).state_dict_metadata
    return {
        name.removeprefix(f"{part}."): tuple(entry.size)
        for name, entry in saved.items()
        if name.startswith(f"{part}.") and isinstance(entry, TensorStorageMetadata)
    }


def has_key(path: Path, key: str) -> bool:
    """Return True if a directory contains anything below a key, such as ``"optimizer_0.state"``."""
    saved = read_metadata(path / _METADATA).state_dict_metadata
    return any(name.startswith(f"{key}.") for name in saved)


def read_unsharded(path: Path) -> dict[str, Any]:
    """Return the unsharded part that the first rank saved; an empty dict if torch wrote the directory."""
    return load_file(path / UNSHARDED) if (path / UNSHARDED).is_file() else {}


def read_as_one(path: Path) -> dict[str, Any]:
    """Read a directory as the checkpoint that one process would have written, without a process group.

    Optimizer states, saved by parameter name as ``optimizer_0``, ``optimizer_1`` ..., become the list
    ``optimizer_states``, by parameter number.

    Args:
        path: A directory of Lightning, which must fit into this process's memory.
    """
    content = load_all(path)
    numbers = sorted(int(key.removeprefix("optimizer_")) for key in content if key.startswith("optimizer_"))
    states = [by_number(content.pop(f"optimizer_{number}")) for number in numbers]
    return {**read_unsharded(path), **content, "optimizer_states": states}


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state_dict with parameters by number, as in torch, instead of by name.

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
    """Shard an optimizer's state_dict as its parameters are sharded.

    Args:
        state: The whole state by parameter number, the same on every rank.
        parameters: The parameters in the order of the optimizer's groups; DTensors or plain.

    Returns:
        The state in which every tensor of its parameter's shape is sharded as the parameter is.
    """

    def cut(value: Any, parameter: Tensor) -> Any:
        matches = isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
        return shard_like(value, parameter) if matches else value

    state = dense(dict(state))
    entries = {
        number: {key: cut(value, parameters[number]) for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}
