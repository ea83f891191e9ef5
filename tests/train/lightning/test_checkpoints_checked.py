"""Whether a checkpoint is of the model that is to take it up."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradpolicy.errors import PolicyError
from gradpolicy.train.lightning.checkpoints import check_resumable, load_weights


def save(path: Path, model: nn.Module) -> Path:
    torch.save({"state_dict": model.state_dict()}, path)
    return path


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 3)


def test_the_weights_of_the_model_are_loaded(tmp_path: Path, model: nn.Module) -> None:
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    saved = copy.deepcopy(model)
    path = save(tmp_path / "a.ckpt", saved.half())
    model.weight.data.zero_()
    load_weights(path, model)
    assert torch.equal(model.weight, saved.weight.float())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(2, 4), r"weight is \(4, 2\) there and \(3, 2\) here"),
        (nn.Linear(2, 3, bias=False), 'Missing key.*"bias"'),
        (nn.Sequential(nn.Linear(2, 3)), 'Unexpected key.*"0.weight", "0.bias"'),
    ],
)
def test_a_checkpoint_of_another_model_is_told_apart(
    tmp_path: Path, model: nn.Module, other: nn.Module, words: str
) -> None:
    with pytest.raises(PolicyError, match=rf"^ckpt_path: .*a\.ckpt is of another model: .*{words}"):
        load_weights(save(tmp_path / "a.ckpt", other), model)


@pytest.mark.parametrize(
    ("change", "form"),
    [
        (torch.Tensor.to_sparse, "in torch.sparse_coo"),
        (torch.Tensor.int, "of integers"),
        (lambda weight: weight * 1j, "of complex numbers"),
    ],
)
def test_a_weight_of_another_kind_is_told_apart(change: Any, form: str, tmp_path: Path, model) -> None:
    content = {**model.state_dict(), "weight": change(model.weight.detach())}
    torch.save({"state_dict": content}, tmp_path / "a.ckpt")
    with pytest.raises(PolicyError, match=rf"weight is \(3, 2\) {form} there and \(3, 2\) here"):
        load_weights(tmp_path / "a.ckpt", model)


def test_infinite_parameters_are_refused(tmp_path: Path, model: nn.Module) -> None:
    model.bias.data[1] = torch.inf
    with pytest.raises(PolicyError, match=r"^ckpt_path: .*spoilt\.ckpt holds infinite values in bias$"):
        load_weights(save(tmp_path / "spoilt.ckpt", model), model)


def test_what_is_no_checkpoint_of_a_run_is_told(tmp_path: Path, model: nn.Module) -> None:
    torch.save(model.state_dict(), tmp_path / "weights.ckpt")
    with pytest.raises(PolicyError, match="no 'state_dict'"):
        load_weights(tmp_path / "weights.ckpt", model)


@pytest.fixture
def trained(train, tmp_path: Path) -> dict[str, Any]:
    """What the checkpoint of a run holds."""
    train(max_steps=1).save_checkpoint(tmp_path / "own.ckpt")
    return torch.load(tmp_path / "own.ckpt", weights_only=True)


def test_a_run_goes_on_from_what_it_saved(trained, tmp_path: Path) -> None:
    check_resumable(tmp_path / "own.ckpt")


@pytest.mark.parametrize("name", ["loops", "optimizer_states", "lr_schedulers"])
def test_no_run_goes_on_from_a_checkpoint_that_lacks_something(trained, tmp_path: Path, name: str) -> None:
    del trained[name]
    torch.save(trained, path := tmp_path / "a.ckpt")
    with pytest.raises(PolicyError, match=rf"a\.ckpt holds no {name}: .*callbacks\.initial_weights\.path"):
        check_resumable(path)
