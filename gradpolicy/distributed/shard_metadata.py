"""Reads the metadata of a directory of shards, which torch has pickled, without running any of it.

Plain unpickling runs whatever the file names. Here no name is looked up: each becomes a record that can do
nothing. Known records are then converted to torch's own classes; all others are refused.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gradpolicy.checkpoint_file import UnreadableError, refusal

# The packages of all objects that torch writes; a path is among them.
_MODULES = ("torch", "pathlib")


def read_metadata(path: Path) -> Metadata:
    """Reads the file that ``torch.distributed.checkpoint`` calls ``.metadata``.

    Raises:
        UnreadableError: If it holds anything that torch would not have written, or names a file outside of
            its directory.
    """
    try:
        with path.open("rb") as file:
            metadata = _metadata(_Reader(file).load())
    except (UnreadableError, OSError):
        raise
    except Exception as error:
        # Bytes that are no pickle can raise any error.
        raise UnreadableError(f"is damaged, or made by hand: {path.name} is not what torch writes") from error
    for place in metadata.storage_data.values():
        _check_place(path.parent, place.relative_path)
    return metadata


class _Record:
    """Takes the place of an object: holds its state and does nothing."""

    kind = ""
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Makes a record of every name."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in _MODULES:
            raise UnreadableError(refusal(f"{module}.{name}"))
        if (module, name) == ("torch", "Size"):
            return tuple
        known = vars(torch).get(name)
        if module == "torch" and isinstance(known, torch.dtype):
            return known
        # A new class each time, since a pickle can write to the classes that it names.
        return type(_Record.__name__, (_Record,), {"kind": f"{module}.{name}"})


def _metadata(record: Any) -> Metadata:
    fields = _state(record, "metadata.Metadata")
    return Metadata(
        state_dict_metadata={
            _of(str, name): _entry(entry) for name, entry in fields["state_dict_metadata"].items()
        },
        planner_data=_plain(fields.get("planner_data")),
        storage_data={_index(index): _place(place) for index, place in fields["storage_data"].items()},
    )


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if getattr(record, "kind", "").endswith(".BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _state(record, "metadata.TensorStorageMetadata")
    dtype, *_ = _state(fields["properties"], "metadata.TensorProperties")
    chunks = [_state(chunk, "metadata.ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        # The other properties are deprecated, and not used where tensors are read.
        properties=TensorProperties(dtype=_of(torch.dtype, dtype)),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(record: Any) -> MetadataIndex:
    fields = _state(record, "metadata.MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _of(str, fields["fqn"]),
        None if offset is None else _size(offset),
        None if index is None else _of(int, index),
    )


def _place(record: Any) -> _StorageInfo:
    fields = _state(record, "filesystem._StorageInfo")
    return _StorageInfo(
        _of(str, fields["relative_path"]),
        _of(int, fields["offset"]),
        _of(int, fields["length"]),
        _plain(fields.get("transform_descriptors")),
    )


def _check_place(folder: Path, relative: str) -> None:
    """Refuses a path that leads outside of a folder, through links too."""
    if not (folder / relative).resolve().is_relative_to(folder.resolve()):
        raise UnreadableError(f"names a file outside of it: {relative[:80]!r}")


def _state(record: Any, kind: str) -> Any:
    """The state of an object of one of torch's classes."""
    known = f"torch.distributed.checkpoint.{kind}"
    if isinstance(record, _Record) and record.kind != known:
        raise UnreadableError(refusal(record.kind))
    return _of(_Record, record).state


def _size(value: Any) -> torch.Size:
    return torch.Size(_of(int, length) for length in _of(tuple, value))


def _plain(value: Any) -> Any:
    """Numbers, texts, and containers of them."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(each) for each in value)
    if isinstance(value, _Record):
        raise UnreadableError(refusal(value.kind))
    return _of((str, int, float, type(None)), value)


def _of(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{kind} needed, got {type(value)}")
    return value
