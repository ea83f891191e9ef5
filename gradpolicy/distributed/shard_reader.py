"""Reads shards that ``torch.distributed.checkpoint`` wrote; nothing in them is run.

Torch's own reader unpickles the directory's metadata, and every value that is no tensor.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load

from gradpolicy.checkpoint_file import load_file
from gradpolicy.distributed.shard_metadata import read_metadata


def load_into(state: dict[str, Any], path: Path) -> None:
    """Reads into the tensors of a state; every rank calls this.

    Args:
        state: Tensors, DTensors and plain values, as they were saved or sharded otherwise; it is changed.
        path: The directory.
    """
    with _plain_errors():
        load(state, storage_reader=SafeReader(path), planner=_SafePlanner())


def load_all(path: Path) -> dict[str, Any]:
    """Reads all of a directory into this process's memory, without process group."""
    content: dict[str, Any] = {}
    with _plain_errors():
        _load_state_dict(content, storage_reader=SafeReader(path), planner=_SafePlannerOfAll(), no_dist=True)
    return content


def entries(path: Path, prefix: str) -> Iterator[tuple[str, Any]]:
    """Reads shard by shard: all plain values, and the tensors whose names begin with a prefix."""
    reader = SafeReader(path)
    metadata = reader.read_metadata()
    for index, place in metadata.storage_data.items():
        plain = isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata)
        if plain or index.fqn.startswith(prefix):
            with (path / place.relative_path).open("rb") as file:
                part = reader._slice_file(file, place)
                # torch's own reader undoes the writer's transforms, such as compression.
                whole = reader.transforms.transform_load_stream(None, place.transform_descriptors or (), part)  # type: ignore[arg-type]
                yield index.fqn, load_file(io.BytesIO(whole.read(-1)))


class SafeReader(FileSystemReader):
    """Reads the directory's metadata without unpickling it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads what the directory holds, and where.

        Raises:
            UnreadableError: If it holds anything that torch would not have written.
        """
        metadata = read_metadata(Path(self._get_metadata_path(kwargs.get("rank"))))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _SafeBytes:
    """Makes torch's planner unpickle only what was pickled here."""

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
    """Raises the error of a rank in place of torch's, which has a traceback for each rank."""
    try:
        yield
    except CheckpointException as error:
        raise next(failure for failure, _ in error.failures.values()) from error
