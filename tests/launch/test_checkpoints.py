"""Finding and judging checkpoints."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from gradpolicy.errors import PolicyError
from gradpolicy.launch.checkpoints import check_fits, find_checkpoint


def save(path: Path, model: nn.Module, age: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": model.state_dict()}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 3)


def test_nothing_is_found_where_nothing_is_asked_for(tmp_path: Path) -> None:
    assert find_checkpoint(None, [tmp_path]) is None


def test_last_is_the_newest_that_can_be_read(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "old/checkpoints/last.ckpt", model, age=20)
    good = save(tmp_path / "middle/checkpoints/last.ckpt", model, age=10)
    cut = save(tmp_path / "new/checkpoints/last.ckpt", model)
    cut.write_bytes(cut.read_bytes()[:200])
    with pytest.warns(UserWarning, match="passed over"):
        assert find_checkpoint("last", [tmp_path]) == good


def test_another_checkpoint_of_the_same_run_comes_before_those_of_other_runs(
    tmp_path: Path, model: nn.Module
) -> None:
    save(tmp_path / "old/checkpoints/last.ckpt", model, age=10)
    best = save(tmp_path / "new/checkpoints/best.ckpt", model, age=20)
    cut = save(tmp_path / "new/checkpoints/last.ckpt", model)
    cut.write_bytes(cut.read_bytes()[:200])
    with pytest.warns(UserWarning, match="passed over"):
        assert find_checkpoint("last", [tmp_path]) == best


def test_the_runs_own_directory_comes_before_all_runs(tmp_path: Path, model: nn.Module) -> None:
    own = save(tmp_path / "own/checkpoints/last.ckpt", model, age=50)
    save(tmp_path / "other/checkpoints/last.ckpt", model)
    assert find_checkpoint("last", [tmp_path / "own", tmp_path]) == own


def test_a_run_directory_means_the_newest_in_it(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "checkpoints/best.ckpt", model, age=5)
    last = save(tmp_path / "checkpoints/last.ckpt", model)
    assert find_checkpoint(str(tmp_path), []) == last


@pytest.mark.parametrize("asked", ["last", "none.ckpt", "."])
def test_where_there_is_none_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError, match=r"^ckpt_path"):
        find_checkpoint(asked, [tmp_path])


def test_a_checkpoint_of_the_model_passes(tmp_path: Path, model: nn.Module) -> None:
    assert check_fits(save(tmp_path / "a.ckpt", model), model) is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(2, 4), r"weight is \(4, 2\) there and \(3, 2\) here"),
        (nn.Linear(2, 3, bias=False), "it lacks bias"),
        (nn.Sequential(nn.Linear(2, 3)), "it holds 0.bias, 0.weight, which this model has not"),
    ],
)
def test_a_checkpoint_of_another_model_is_told_apart(
    tmp_path: Path, model: nn.Module, other: nn.Module, words: str
) -> None:
    with pytest.raises(PolicyError, match=words):
        check_fits(save(tmp_path / "a.ckpt", other), model)


def test_what_is_no_checkpoint_of_a_run_is_told(tmp_path: Path, model: nn.Module) -> None:
    torch.save(model.state_dict(), tmp_path / "weights.ckpt")
    with pytest.raises(PolicyError, match="no 'state_dict'"):
        check_fits(tmp_path / "weights.ckpt", model)
