"""The metadata of a directory of shards is read as torch reads it, and nothing in it is run."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gradpolicy.checkpoint_file import UnreadableError
from gradpolicy.distributed.shard_metadata import read_metadata
from gradpolicy.distributed.sharded_checkpoint import save_whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STATE = {
    "state_dict": {"weight": torch.arange(15.0).view(5, 3), "bias": torch.ones(2, dtype=torch.bfloat16)},
    "loops": {"epoch": 3, "name": "fit", "lr": 0.1, "none": None},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_whole(STATE, {}, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt" / ".metadata"


def torchs_own(path: Path) -> Metadata:
    return FileSystemReader(path.parent).read_metadata()


def write(path: Path, metadata: Any) -> None:
    path.write_bytes(pickle.dumps(metadata))


def test_it_is_what_torch_itself_reads(path: Path) -> None:
    own, expected = read_metadata(path), torchs_own(path)
    assert own.storage_data == expected.storage_data
    assert own.planner_data == expected.planner_data
    assert own.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for name, entry in expected.state_dict_metadata.items():
        read = own.state_dict_metadata[name]
        assert type(read) is type(entry)
        if isinstance(entry, TensorStorageMetadata):
            assert isinstance(read, TensorStorageMetadata)
            assert (read.size, read.chunks) == (entry.size, entry.chunks)
            assert read.properties.dtype == entry.properties.dtype


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("where", ["all of it", "planner_data", "storage_data", "state_dict_metadata"])
def test_code_in_any_place_is_refused_by_name_and_not_run(path: Path, tmp_path: Path, where: str) -> None:
    evil, metadata = Runs(tmp_path / "ran"), torchs_own(path)
    if where != "all of it":
        setattr(metadata, where, {"x": evil})
    write(path, evil if where == "all of it" else metadata)
    with pytest.raises(UnreadableError, match=r"(posix|nt)\.mkdir"):
        read_metadata(path)
    assert not (tmp_path / "ran").exists()


def test_an_object_of_torchs_in_the_wrong_place_is_refused_by_name(path: Path) -> None:
    write(path, torch.distributed.checkpoint.metadata.BytesStorageMetadata())
    with pytest.raises(UnreadableError, match="BytesStorageMetadata"):
        read_metadata(path)
    metadata = torchs_own(path)
    metadata.planner_data = {"x": [torch.distributed.checkpoint.metadata.BytesStorageMetadata()]}
    write(path, metadata)
    with pytest.raises(UnreadableError, match="BytesStorageMetadata"):
        read_metadata(path)


def test_what_a_pickle_writes_to_a_class_is_not_kept(path: Path, tmp_path: Path) -> None:
    """`BUILD` on a class sets its attributes; those of the next reading must be its own."""
    spoilt = b"ctorch\nSpoilt\n}(S'kind'\nS'torch.distributed.checkpoint.metadata.Metadata'\nub."
    (tmp_path / "spoilt").write_bytes(spoilt)
    with pytest.raises(UnreadableError):
        read_metadata(tmp_path / "spoilt")
    assert read_metadata(path).storage_data == torchs_own(path).storage_data


@pytest.mark.parametrize(
    ("field", "value"), [("offset", "0"), ("length", None), ("relative_path", 3), ("relative_path", b"x")]
)
def test_a_value_of_another_type_is_damage(path: Path, field: str, value: Any) -> None:
    metadata = torchs_own(path)
    for place in metadata.storage_data.values():
        setattr(place, field, value)
    write(path, metadata)
    with pytest.raises(UnreadableError, match=r"is damaged, or made by hand: \.metadata"):
        read_metadata(path)


def test_a_size_of_texts_is_damage(path: Path) -> None:
    metadata = torchs_own(path)
    weight = metadata.state_dict_metadata["state_dict.weight"]
    assert isinstance(weight, TensorStorageMetadata)
    weight.chunks[0].sizes = ("5", "3")  # type: ignore[assignment]
    write(path, metadata)
    with pytest.raises(UnreadableError, match="is damaged, or made by hand"):
        read_metadata(path)


def test_bytes_that_are_no_pickle_are_damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UnreadableError, match="is damaged, or made by hand"):
        read_metadata(path)


def test_an_absent_file_is_absent_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_metadata(tmp_path / ".metadata")


@pytest.mark.parametrize("relative", ["../secret", "/etc/hostname", "link"])
def test_a_file_outside_of_the_directory_is_refused(path: Path, tmp_path: Path, relative: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (path.parent / "link").symlink_to(tmp_path / "secret")
    metadata = torchs_own(path)
    for place in metadata.storage_data.values():
        place.relative_path = relative
    write(path, metadata)
    with pytest.raises(UnreadableError, match=f"names a file outside of it: '{relative}'"):
        read_metadata(path)
