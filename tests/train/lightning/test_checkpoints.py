"""The one door: what is wrong with a checkpoint is told in one line, and nothing in it is run."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradpolicy.errors import PolicyError
from gradpolicy.tensors.checkpoint_file import check_file
from gradpolicy.train.lightning import checkpoints
from gradpolicy.train.lightning.checkpoints import (
    AtomicCheckpointIO,
    check_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from tests.hostile import MakesFolder

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage", "ignore:.*cannot be told")


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What is there once a checkpoint has run something."""
    return tmp_path / "ran"


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return nn.Linear(20, 3).state_dict()


def refused(path: Path, ran: Path) -> str:
    """The one message with which every reader refuses it; nothing is run."""
    messages = set()
    for read in (
        check_checkpoint,
        read_checkpoint,
        AtomicCheckpointIO().load_checkpoint,
        lambda path: AtomicCheckpointIO().load_checkpoint(path, weights_only=False),
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


# ---- nothing is run


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_refused(tmp_path: Path, ran: Path, zipped: bool) -> None:
    content = {"state_dict": weights(), "callbacks": MakesFolder(ran)}
    torch.save(content, tmp_path / "evil.ckpt", _use_new_zipfile_serialization=zipped)
    assert "holds posix.mkdir" in refused(tmp_path / "evil.ckpt", ran)


# ---- nothing is deleted


@pytest.mark.parametrize("named", ["local:///home/me", "s3://bucket/mine", "/runs/a/../../home/me", "a::b"])
@pytest.mark.parametrize("field", [*checkpoints.PATHS, "best_k_models"])
def test_paths_that_a_callback_would_delete_are_refused(
    tmp_path: Path, ran: Path, named: str, field: str
) -> None:
    callbacks = {"ModelCheckpoint{}": {field: {named: 0.5} if field == "best_k_models" else named}}
    write_checkpoint({"state_dict": weights(), "callbacks": callbacks}, tmp_path / "a.ckpt")
    assert repr(named) in refused(tmp_path / "a.ckpt", ran)


# ---- damage


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
            AtomicCheckpointIO().load_checkpoint(path)
    assert looked == [path, path]


# ---- weights


SPOILT = torch.tensor([[1.0, torch.nan], [0.0, 2.0]])


@pytest.mark.parametrize(
    "spoilt",
    [
        *map(SPOILT.to, (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64)),
        SPOILT.to_sparse(),
        torch.complex(torch.ones(2), torch.tensor([0.0, torch.nan])),
    ],
    ids=["float32", "bfloat16", "float8", "complex", "sparse", "imaginary"],
)
def test_nan_weights_are_refused_by_name(tmp_path: Path, ran: Path, spoilt: torch.Tensor) -> None:
    write_checkpoint({"state_dict": {"good": torch.ones(2), "spoilt": spoilt}}, tmp_path / "a.ckpt")
    assert "holds NaN in spoilt" in refused(tmp_path / "a.ckpt", ran)


def test_weights_without_entries_or_fractions_are_taken(tmp_path: Path) -> None:
    state = {"empty": torch.zeros(0), "count": torch.tensor(3), "mask": torch.tensor([True]), "name": "words"}
    write_checkpoint({"state_dict": state}, tmp_path / "a.ckpt")
    check_checkpoint(tmp_path / "a.ckpt")


def test_a_file_of_weights_alone_can_be_tested(tmp_path: Path) -> None:
    write_checkpoint({"state_dict": weights()}, tmp_path / "weights.ckpt")
    assert read_checkpoint(tmp_path / "weights.ckpt")["pytorch-lightning_version"]
    write_checkpoint({"state_dict": weights(), "pytorch-lightning_version": "2.0"}, tmp_path / "whole.ckpt")
    assert read_checkpoint(tmp_path / "whole.ckpt")["pytorch-lightning_version"] == "2.0"


@pytest.mark.parametrize("content", [[1, 2], {"step": 3}, {"state_dict": [1, 2]}])
def test_what_holds_no_weights_by_name_is_no_checkpoint_of_a_run(tmp_path: Path, content: Any) -> None:
    write_checkpoint(content, tmp_path / "a.ckpt")
    with pytest.raises(PolicyError, match="holds no 'state_dict' with tensors by name"):
        read_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "callbacks",
    [
        3,
        {"ModelCheckpoint{}": 3},
        {"ModelCheckpoint{}": {"best_k_models": 3}},
        {"ModelCheckpoint{}": {"best_model_path": "/runs/a/b.ckpt", "best_k_models": {"a/b.ckpt": 0.5}}},
    ],
)
def test_states_of_callbacks_that_name_no_dangerous_paths_are_taken(tmp_path: Path, callbacks: Any) -> None:
    write_checkpoint({"state_dict": weights(), "callbacks": callbacks}, tmp_path / "a.ckpt")
    assert read_checkpoint(tmp_path / "a.ckpt")["callbacks"] == callbacks


def test_only_what_has_no_checksums_is_told_of(tmp_path: Path) -> None:
    write_checkpoint({"state_dict": weights()}, tmp_path / "whole.ckpt")
    former = tmp_path / "former.ckpt"
    torch.save({"state_dict": weights()}, former, _use_new_zipfile_serialization=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for path in (tmp_path / "whole.ckpt", former):
            check_checkpoint(path)
    lines = [str(each.message) for each in told if "checksums" in str(each.message)]
    assert lines == [f"{former} was written without checksums: it cannot be told whether it is damaged"]


def test_tensors_go_where_they_are_mapped_to(tmp_path: Path) -> None:
    write_checkpoint({"state_dict": weights()}, tmp_path / "a.ckpt")
    loaded = AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", map_location="meta")
    assert loaded["state_dict"]["weight"].is_meta


def test_tensors_of_a_checkpoint_that_is_loaded_outlast_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint({"state_dict": weights()}, path)
    loaded = read_checkpoint(path, mmap=False)
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(loaded["state_dict"]["weight"], weights()["weight"])


def test_of_a_pickle_that_is_no_checkpoint_the_refusal_is_all_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "given.ckpt"
    path.write_bytes(pickle.dumps(None, protocol=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PolicyError, match=r"given\.ckpt is truncated or damaged, or no checkpoint"):
            check_checkpoint(path)
