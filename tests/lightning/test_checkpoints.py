"""The one door: what is wrong with a checkpoint is told in one line, and nothing in it is run."""

import os
import pickle
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from gradpolicy.checkpoint_file import check_file
from gradpolicy.distributed.sharded_checkpoint import save_whole
from gradpolicy.errors import PolicyError
from gradpolicy.lightning import checkpoints
from gradpolicy.lightning.checkpoints import (
    WholeCheckpointIO,
    check_checkpoint,
    load_checkpoint,
    read_checkpoint,
    read_checkpoint_weights,
    write_checkpoint,
)
from tests.hostile import MakesFolder

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:.*TypedStorage", "ignore:.*cannot be told"
)


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What is there once a checkpoint has run something."""
    return tmp_path / "ran"


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return nn.Linear(20, 3).state_dict()


def sharded(**more: Any) -> dict[str, Any]:
    optimizer = {"state": {"weight": {"step": 3.0}}, "param_groups": [{"params": ["weight"], "lr": 0.1}]}
    return {"state_dict": weights(), "optimizer_0": optimizer, **more}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_whole(sharded(), {"global_step": 3}, tmp_path / "shards.ckpt")
    return tmp_path / "shards.ckpt"


@pytest.fixture
def of_torch(tmp_path: Path) -> Path:
    """A directory without checksums and without Lightning's own file."""
    dcp.save(sharded(), storage_writer=FileSystemWriter(tmp_path / "torch.ckpt"), no_dist=True)
    return tmp_path / "torch.ckpt"


def refused(path: Path, ran: Path) -> str:
    """The one message with which every reader refuses it; nothing is run."""
    messages = set()
    for read in (
        check_checkpoint,
        read_checkpoint,
        read_checkpoint_weights,
        load_checkpoint,
        WholeCheckpointIO().load_checkpoint,
        lambda path: WholeCheckpointIO().load_checkpoint(path, weights_only=False),
    ):
        with pytest.raises(PolicyError) as caught:
            read(path)
        messages.add(str(caught.value))
    (message,) = messages
    assert message.startswith(f"ckpt_path: {path} ")
    assert "\n" not in message
    assert "weights_only" not in message
    assert not ran.exists()
    return message


def change_metadata(path: Path, change: Any) -> None:
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


# ---- nothing is run


def test_code_in_a_file_is_refused(tmp_path: Path, ran: Path) -> None:
    torch.save({"state_dict": weights(), "callbacks": MakesFolder(ran)}, tmp_path / "evil.ckpt")
    assert "holds posix.mkdir" in refused(tmp_path / "evil.ckpt", ran)


def test_code_in_a_file_of_torchs_former_format_is_refused(tmp_path: Path, ran: Path) -> None:
    content = {"state_dict": weights(), "callbacks": MakesFolder(ran)}
    torch.save(content, tmp_path / "evil.ckpt", _use_new_zipfile_serialization=False)
    assert refused(tmp_path / "evil.ckpt", ran)
    assert not ran.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_code_as_metadata_is_refused(of_torch: Path, ran: Path, protocol: int) -> None:
    (of_torch / ".metadata").write_bytes(pickle.dumps(MakesFolder(ran), protocol))
    assert "holds posix.mkdir" in refused(of_torch, ran)


@pytest.mark.parametrize("field", ["state_dict_metadata", "planner_data", "storage_data", "storage_meta"])
def test_code_anywhere_in_metadata_is_refused(of_torch: Path, ran: Path, field: str) -> None:
    evil = {"state_dict.weight": MakesFolder(ran)}
    change_metadata(of_torch, lambda metadata: setattr(metadata, field, evil))
    assert "holds posix.mkdir" in refused(of_torch, ran)


def test_names_of_torch_that_run_code_do_nothing(of_torch: Path, ran: Path) -> None:
    class Load(MakesFolder):
        def __reduce__(self) -> tuple:
            return torch.load, (str(self.folder), None, None)

    change_metadata(of_torch, lambda metadata: setattr(metadata, "planner_data", Load(ran)))
    assert "holds torch.serialization.load" in refused(of_torch, ran)


def test_code_in_lightnings_own_file_is_refused(directory: Path, of_torch: Path, ran: Path) -> None:
    torch.save(MakesFolder(ran), of_torch / "meta.pt")
    assert "holds posix.mkdir" in refused(of_torch, ran)
    torch.save(MakesFolder(ran), directory / "meta.pt")
    assert "meta.pt differs from its checksum" in refused(directory, ran)


@pytest.mark.parametrize("key", ["state_dict", "optimizer_0", "other"])
def test_code_among_the_shards_is_refused(tmp_path: Path, ran: Path, key: str) -> None:
    path = tmp_path / "evil.ckpt"
    content = {"state_dict": weights(), "optimizer_0": {}, "other": {}}
    content[key]["evil"] = MakesFolder(ran)  # type: ignore[assignment]
    save_whole(content, {"global_step": 3}, path)
    assert refused(path, ran)
    assert not ran.exists()


@pytest.mark.parametrize("place", ["../outside", "/etc/passwd", "link"])
def test_shards_outside_of_the_directory_are_refused(of_torch: Path, ran: Path, place: str) -> None:
    shutil.copy(of_torch / "__0_0.distcp", of_torch.parent / "outside")
    (of_torch / "link").symlink_to(of_torch.parent / "outside")

    def move(metadata: Metadata) -> None:
        for index, told in metadata.storage_data.items():
            metadata.storage_data[index] = _StorageInfo(place, told.offset, told.length)

    change_metadata(of_torch, move)
    assert f"names a file outside of it: {place!r}" in refused(of_torch, ran)


# ---- nothing is deleted


@pytest.mark.parametrize("named", ["local:///home/me", "s3://bucket/mine", "/runs/a/../../home/me", "a::b"])
@pytest.mark.parametrize("field", [*checkpoints.PATHS, "best_k_models"])
def test_paths_that_a_callback_would_delete_are_refused(
    tmp_path: Path, ran: Path, named: str, field: str
) -> None:
    state = {field: {named: 0.5} if field == "best_k_models" else named}
    write_checkpoint(
        {"state_dict": weights(), "callbacks": {"ModelCheckpoint{}": state}}, tmp_path / "a.ckpt"
    )
    assert repr(named) in refused(tmp_path / "a.ckpt", ran)
    state = {"best_model_path": "/runs/before/best.ckpt", "best_k_models": {"relative/best.ckpt": 0.5}}
    write_checkpoint(
        {"state_dict": weights(), "callbacks": {"ModelCheckpoint{}": state}}, tmp_path / "b.ckpt"
    )
    assert read_checkpoint(tmp_path / "b.ckpt")["callbacks"]["ModelCheckpoint{}"] == state


# ---- damage


def test_each_of_40_flipped_bits_in_a_directory_is_refused(directory: Path, ran: Path) -> None:
    assert {"whole", "meta.pt", ".metadata", "__0_0.distcp"} == set(os.listdir(directory))
    for file in directory.iterdir():
        assert_flips_are_refused(directory, [file], ran)


def assert_flips_are_refused(path: Path, files: list[Path], ran: Path) -> None:
    numbers = random.Random(12)
    for _ in range(40):
        file = numbers.choice(files)
        whole = file.read_bytes()
        changed = bytearray(whole)
        changed[numbers.randrange(len(whole))] ^= 1 << numbers.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(PolicyError, match=r"^ckpt_path: "):
            check_checkpoint(path)
        file.write_bytes(whole)
    assert check_checkpoint(path) == frozenset()


def test_a_missing_shard_is_named(directory: Path, ran: Path) -> None:
    (directory / "__0_0.distcp").unlink()
    assert "has no file '__0_0.distcp'" in refused(directory, ran)


def test_what_others_wrote_is_read_with_a_word_that_it_cannot_be_checked(of_torch: Path) -> None:
    with pytest.warns(UserWarning, match="cannot be told whether it is damaged"):
        content = load_checkpoint(of_torch)
    assert torch.equal(content["state_dict"]["weight"], weights()["weight"])
    assert content["optimizer_states"][0]["param_groups"] == [{"params": [0], "lr": 0.1}]


def test_a_checkpoint_is_looked_through_once_until_it_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    monkeypatch.setattr(checkpoints, "check_file", lambda path: looked.append(path) or check_file(path))
    path = tmp_path / "last.ckpt"
    for saved in range(2):
        write_checkpoint({"state_dict": weights(), "global_step": saved}, path)
        for _ in range(3):
            read_checkpoint(path)
            WholeCheckpointIO().load_checkpoint(path)
    assert looked == [path, path]


# ---- weights


def save_as(kind: str, path: Path, state: dict[str, torch.Tensor]) -> None:
    if kind == "file":
        write_checkpoint({"state_dict": state}, path)
    else:
        save_whole({"state_dict": state}, {}, path)


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_nan_weights_are_refused_by_name(tmp_path: Path, ran: Path, kind: str, dtype: torch.dtype) -> None:
    spoilt = torch.ones(5, 4)
    spoilt[3, 2] = torch.nan
    save_as(kind, tmp_path / "a.ckpt", {"good": torch.ones(2), "spoilt": spoilt.to(dtype)})
    assert "holds NaN in spoilt" in refused(tmp_path / "a.ckpt", ran)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_infinite_values_are_found_but_may_be_those_of_a_mask(tmp_path: Path, kind: str) -> None:
    save_as(kind, tmp_path / "a.ckpt", {"mask": torch.tensor([0.0, -torch.inf]), "weight": torch.ones(2)})
    assert check_checkpoint(tmp_path / "a.ckpt") == {"mask"}


@pytest.mark.parametrize(
    "spoilt",
    [
        torch.tensor([[1.0, torch.nan], [0.0, 2.0]]).to_sparse(),
        torch.complex(torch.ones(2), torch.tensor([0.0, torch.nan])),
    ],
    ids=["sparse", "imaginary"],
)
def test_nan_is_found_in_tensors_of_any_layout(tmp_path: Path, ran: Path, spoilt: torch.Tensor) -> None:
    write_checkpoint({"state_dict": {"spoilt": spoilt}}, tmp_path / "a.ckpt")
    assert "holds NaN in spoilt" in refused(tmp_path / "a.ckpt", ran)


def test_weights_without_entries_or_fractions_are_taken(tmp_path: Path) -> None:
    state = {"empty": torch.zeros(0), "count": torch.tensor(3), "mask": torch.tensor([True]), "name": "words"}
    write_checkpoint({"state_dict": state}, tmp_path / "a.ckpt")
    assert check_checkpoint(tmp_path / "a.ckpt") == frozenset()


def test_a_file_of_weights_alone_can_be_tested(tmp_path: Path) -> None:
    write_checkpoint({"state_dict": weights()}, tmp_path / "weights.ckpt")
    assert load_checkpoint(tmp_path / "weights.ckpt")["pytorch-lightning_version"]
    write_checkpoint({"state_dict": weights(), "pytorch-lightning_version": "2.0"}, tmp_path / "whole.ckpt")
    assert load_checkpoint(tmp_path / "whole.ckpt")["pytorch-lightning_version"] == "2.0"


@pytest.mark.parametrize("content", [[1, 2], {"step": 3}, {"state_dict": [1, 2]}])
def test_what_holds_no_weights_by_name_is_no_checkpoint_of_a_run(tmp_path: Path, content: Any) -> None:
    write_checkpoint(content, tmp_path / "a.ckpt")
    for read in (read_checkpoint, read_checkpoint_weights, load_checkpoint):
        with pytest.raises(PolicyError, match="holds no 'state_dict' with tensors by name"):
            read(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "callbacks", [3, {"ModelCheckpoint{}": 3}, {"ModelCheckpoint{}": {"best_k_models": 3}}]
)
def test_states_of_callbacks_that_name_no_paths_are_taken(tmp_path: Path, callbacks: Any) -> None:
    write_checkpoint({"state_dict": weights(), "callbacks": callbacks}, tmp_path / "a.ckpt")
    assert read_checkpoint(tmp_path / "a.ckpt")["callbacks"] == callbacks


def test_only_what_has_no_checksums_is_told_of(tmp_path: Path, directory: Path) -> None:
    write_checkpoint({"state_dict": weights()}, tmp_path / "whole.ckpt")
    former = tmp_path / "former.ckpt"
    torch.save({"state_dict": weights()}, former, _use_new_zipfile_serialization=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for path in (tmp_path / "whole.ckpt", directory, former):
            check_checkpoint(path)
    lines = [str(each.message) for each in told if "checksums" in str(each.message)]
    assert lines == [f"{former} was written without checksums: it cannot be told whether it is damaged"]


def test_a_directory_that_was_written_again_is_looked_through_again(directory: Path) -> None:
    assert read_checkpoint_weights(directory).keys() == weights().keys()
    former = check_checkpoint(directory)
    assert check_checkpoint(directory) is former
    save_whole(sharded(), {"global_step": 4}, directory)
    assert check_checkpoint(directory) is not former
    assert read_checkpoint(directory)["global_step"] == 4


def test_tensors_go_where_they_are_mapped_to(tmp_path: Path) -> None:
    write_checkpoint({"state_dict": weights()}, tmp_path / "a.ckpt")
    loaded = WholeCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", map_location="meta")
    assert loaded["state_dict"]["weight"].is_meta


def test_tensors_of_a_checkpoint_that_is_loaded_outlast_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint({"state_dict": weights()}, path)
    loaded = load_checkpoint(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(loaded["state_dict"]["weight"], weights()["weight"])


def test_of_a_pickle_that_is_no_checkpoint_the_refusal_is_all_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "given.ckpt"
    path.write_bytes(pickle.dumps(None, protocol=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PolicyError, match=r"given\.ckpt is truncated or damaged, or no checkpoint"):
            check_checkpoint(path)
