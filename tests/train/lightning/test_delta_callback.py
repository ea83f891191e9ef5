"""A run writes what it changed, compared with what it began with, resumed or not."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file, save_file

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.train.lightning.delta_callback import SaveDelta


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.supports("delta", loop="lightning")
def test_the_file_leads_from_the_first_weights_to_the_last(two_layers, train, tmp_path: Path) -> None:
    began = weights(two_layers)
    names = list(began)
    policies = {"rows": gp.Freeze(gp.masks.Rows(":2"), params=names[0])}
    folder = tmp_path / "run" / "delta"
    train(policies, SaveDelta(str(folder)), max_steps=3)
    info = gp.delta.info(folder / "delta.safetensors")
    assert {tensor.name: tensor.form for tensor in info.tensors}[names[0]] == "rows"
    base = load_file(folder / "base.safetensors")
    assert same(base, began)
    gp.delta.apply(base, info.path)
    assert same(base, two_layers.state_dict())


def test_a_resumed_run_compares_with_what_the_first_began_with(two_layers, train, tmp_path: Path) -> None:
    began = weights(two_layers)
    train(SaveDelta(str(tmp_path / "first")), max_steps=2).save_checkpoint(tmp_path / "last.ckpt")
    train(SaveDelta(str(tmp_path / "second")), max_steps=4, resume=tmp_path / "last.ckpt")
    assert not (tmp_path / "second" / "base.safetensors").exists()
    gp.delta.revert(two_layers, tmp_path / "second" / "delta.safetensors")
    assert same(two_layers.state_dict(), began)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": "nothing.safetensors"}, r"callbacks\.delta\.base: nothing\.safetensors is not a file"),
        ({"base": "other.safetensors"}, "the model has no tensor other"),
        ({"module": "nothing"}, r"callbacks\.delta\.module: unknown module 'nothing'"),
    ],
)
def test_what_is_absent_or_of_another_model_is_named_before_training(
    two_layers, train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"other": torch.zeros(3)}, "other.safetensors")
    before = weights(two_layers)
    with pytest.raises(PolicyError, match=message):
        train(SaveDelta("run", **arguments), max_steps=1)
    assert same(two_layers.state_dict(), before)


def test_ranks_wait_for_each_other_once_the_file_is_written(two_layers, train, tmp_path: Path) -> None:
    """Or one of them would look for it too early."""
    there: list[bool] = []

    class Waits(SingleDeviceStrategy):
        def barrier(self, name: str | None = None) -> None:
            if name == "gradpolicy.delta":
                there.append((tmp_path / "delta.safetensors").exists())

    train(SaveDelta(str(tmp_path)), strategy=Waits())
    assert there == [True]


@pytest.mark.parametrize("name", ["delta.safetensors", "base.safetensors"])
def test_files_of_others_are_kept_and_named_before_training(train, tmp_path: Path, name: str) -> None:
    mine = {"mine": torch.ones(1)}
    save_file(mine, tmp_path / name)
    with pytest.raises(PolicyError, match=f"{name} is there already"):
        train(SaveDelta(str(tmp_path)), max_steps=1)
    assert load_file(tmp_path / name).keys() == mine.keys()


def test_a_second_run_replaces_the_files_of_the_first(two_layers, train, tmp_path: Path) -> None:
    for _ in range(2):
        began = weights(two_layers)
        train(SaveDelta(str(tmp_path)), max_steps=1)
    gp.delta.revert(two_layers, tmp_path / "delta.safetensors")
    assert same(two_layers.state_dict(), began)
