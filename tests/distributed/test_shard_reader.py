"""Shards are read whole, by name, or into a state that is there."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from gradpolicy.checkpoint_file import UnreadableError
from gradpolicy.distributed.shard_reader import entries, load_all, load_into, read_metadata
from tests.hostile import MakesFolder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WEIGHT, BIAS = torch.arange(15.0).view(5, 3), torch.full((2,), 0.5, dtype=torch.bfloat16)


class Strange:
    """An object of a class that is not torch's."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(
        tmp_path, {"model": {"weight": WEIGHT, "bias": BIAS}, "loops": {"epoch": 3, "name": "fit"}}
    )


def written(folder: Path, state: dict[str, Any]) -> Path:
    save(state, storage_writer=FileSystemWriter(folder / "a.ckpt"), no_dist=True)
    return folder / "a.ckpt"


def test_all_of_a_directory_comes_back(path: Path) -> None:
    content = load_all(path)
    assert content["loops"] == {"epoch": 3, "name": "fit"}
    torch.testing.assert_close(content["model"], {"weight": WEIGHT, "bias": BIAS}, rtol=0, atol=0)


def test_the_tensors_of_a_state_are_filled(path: Path) -> None:
    weight = torch.zeros(5, 3)
    state: dict[str, Any] = {"model": {"weight": weight}, "loops": {"epoch": 0}}
    load_into(state, path)
    assert torch.equal(weight, WEIGHT)
    assert state["loops"]["epoch"] == 3


def test_entries_are_the_plain_values_and_the_tensors_of_a_prefix(path: Path) -> None:
    found = dict(entries(path, "model.w"))
    assert found.keys() == {"model.weight", "loops.epoch", "loops.name"}
    assert torch.equal(found["model.weight"], WEIGHT)
    assert (found["loops.epoch"], found["loops.name"]) == (3, "fit")
    assert "model.weight" not in dict(entries(path, "other"))


def test_a_value_that_is_an_object_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"model": {"weight": WEIGHT}, "strange": Strange()})
    for read in (
        load_all,
        lambda path: load_into({"strange": 0}, path),
        lambda path: dict(entries(path, "")),
    ):
        with pytest.raises(UnreadableError, match="Strange"):
            read(path)


def test_an_error_is_the_ranks_own_not_torchs_collection(path: Path) -> None:
    for shard in path.glob("*.distcp"):
        shard.unlink()
    for read in (load_all, lambda path: load_into({"model": {"weight": torch.zeros(5, 3)}}, path)):
        with pytest.raises(FileNotFoundError) as caught:
            read(path)
        assert isinstance(caught.value.__cause__, CheckpointException)


def test_metadata_is_what_torch_reads_and_not_just_unpickled(path: Path, tmp_path: Path) -> None:
    own, torchs = read_metadata(path / ".metadata"), FileSystemReader(path).read_metadata()
    for part in ("state_dict_metadata", "storage_data", "planner_data"):
        assert getattr(own, part) == getattr(torchs, part)
    (path / ".metadata").write_bytes(pickle.dumps(MakesFolder(tmp_path / "ran")))
    for read in (load_all, lambda path: load_into({"loops": {"epoch": 0}}, path)):
        with pytest.raises(Exception, match=r"posix\.mkdir"):
            read(path)
    assert not (tmp_path / "ran").exists()


def test_metadata_of_another_kind_is_refused(path: Path) -> None:
    whole = (path / ".metadata").read_bytes()
    for content, words in (
        (pickle.dumps(torch.distributed.checkpoint.metadata.BytesStorageMetadata()), "BytesStorageMetadata"),
        (whole[:-20], "is damaged, or made by hand"),
        (pickle.dumps(3), "holds int"),
    ):
        (path / ".metadata").write_bytes(content)
        with pytest.raises(UnreadableError, match=words):
            read_metadata(path / ".metadata")
    (path / ".metadata").unlink()
    with pytest.raises(FileNotFoundError):
        read_metadata(path / ".metadata")
