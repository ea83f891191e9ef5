"""Reads the shards of ``torch.distributed.checkpoint`` without running code from them.

Torch's own reader unpickles the directory's metadata, and every value that is not a tensor.
"""

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load

from gradpolicy.checkpoint_file import UnreadableError, load_file, refusal

# The classes of torch that metadata consists of, by their modules. They only hold values.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
}


def read_metadata(path: Path) -> Metadata:
    """Read the file that ``torch.distributed.checkpoint`` calls ``.metadata``.

    Raises:
        UnreadableError: If it contains anything that torch would not have written, or names a file outside of
            its directory.
    """
    folder = path.parent.resolve()
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise UnreadableError(refusal(type(metadata).__name__))
        for place in metadata.storage_data.values():
            # Through links too.
            if not (folder / place.relative_path).resolve().is_relative_to(folder):
                raise UnreadableError(f"names a file outside of it: {place.relative_path[:80]!r}")
    except (UnreadableError, OSError):
        raise
    except Exception as error:
        # Invalid pickles can raise any error.
        raise UnreadableError(f"is damaged, or made by hand: {path.name} is not what torch writes") from error
    return metadata


class _Unpickler(pickle.Unpickler):
    """An unpickler that allows the classes of metadata only."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":
            return PurePosixPath
        dtype = vars(torch).get(name) if module == "torch" else None
        if name in _CLASSES.get(module, ()) or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise UnreadableError(refusal(f"{module}.{name}"))


def load_into(state: dict[str, Any], path: Path) -> None:
    """Read into the tensors of a state; every rank calls this.

    Args:
        state: Tensors, DTensors and plain values, sharded as they were saved or otherwise; changed in place.
        path: The directory.
    """
    with _plain_errors():
        load(state, storage_reader=SafeReader(path), planner=_SafePlanner())


def load_all(path: Path) -> dict[str, Any]:
    """Read a whole directory into this process's memory, without a process group."""
    content: dict[str, Any] = {}
    with _plain_errors():
        _load_state_dict(content, storage_reader=SafeReader(path), planner=_SafePlannerOfAll(), no_dist=True)
    return content


def entries(path: Path, prefix: str) -> Iterator[tuple[str, Any]]:
    """Read all plain values, then the tensors whose names begin with a prefix one by one.

    All tensors together may not fit into memory.
    """
    kinds = read_metadata(path / ".metadata").state_dict_metadata
    plain: dict[str, Any] = {
        name: None for name, kind in kinds.items() if isinstance(kind, BytesStorageMetadata)
    }
    tensors = [name for name in kinds if name not in plain and name.startswith(prefix)]
    for state in (plain, *({name: None} for name in tensors)):
        for name in state.keys() - plain.keys():
            kind: Any = kinds[name]
            state[name] = torch.empty(kind.size, dtype=kind.properties.dtype)
        with _plain_errors():
            _load_state_dict(state, storage_reader=SafeReader(path), planner=_SafePlanner(), no_dist=True)
        yield from state.items()


class SafeReader(FileSystemReader):
    """A reader that unpickles only the classes of metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the directory.

        Raises:
            UnreadableError: If it contains anything that torch would not have written.
        """
        metadata = read_metadata(Path(self._get_metadata_path(kwargs.get("rank"))))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _SafeBytes:
    """Restricts the unpickling of torch's planner to values that this module has pickled."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        anew = io.BytesIO()
        torch.save(load_file(value), anew)
        anew.seek(0)
        super().load_bytes(read_item, anew)  # type: ignore[misc]


class _SafePlanner(_SafeBytes, DefaultLoadPlanner):
    pass


class _SafePlannerOfAll(_SafeBytes, _EmptyStateDictLoadPlanner):
    pass


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error of a rank instead of torch's error, which has a traceback for each rank."""
    try:
        yield
    except CheckpointException as error:
        raise next(failure for failure, _ in error.failures.values()) from error
