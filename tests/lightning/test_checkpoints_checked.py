"""Whether a checkpoint is of the model that is to take it up."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradpolicy.errors import PolicyError
from gradpolicy.lightning.checkpoints import check_fits, check_optimizer, check_resumable
from gradpolicy.tasks.classification import Classifier


def save(path: Path, model: nn.Module) -> Path:
    torch.save({"state_dict": model.state_dict()}, path)
    return path


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 3)


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


def test_of_many_shapes_that_differ_two_are_told(tmp_path: Path) -> None:
    wide, narrow = (nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2)) for width in (4, 3))
    with pytest.raises(PolicyError) as refused:
        check_fits(save(tmp_path / "a.ckpt", wide), narrow)
    assert str(refused.value).count(" there and ") == 2


def test_infinite_values_are_refused_in_parameters_and_taken_in_buffers(
    tmp_path: Path, model: nn.Module
) -> None:
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    check_fits(save(tmp_path / "masked.ckpt", model), model)
    model.bias.data[1] = torch.inf
    with pytest.raises(PolicyError, match=r"^ckpt_path: .*spoilt\.ckpt holds infinite values in bias$"):
        check_fits(save(tmp_path / "spoilt.ckpt", model), model)


def test_what_is_no_checkpoint_of_a_run_is_told(tmp_path: Path, model: nn.Module) -> None:
    torch.save(model.state_dict(), tmp_path / "weights.ckpt")
    with pytest.raises(PolicyError, match="no 'state_dict'"):
        check_fits(tmp_path / "weights.ckpt", model)


def saved_after_a_step(model: nn.Module, make: partial, path: Path, **changes: object) -> Path:
    """A checkpoint of the optimizer's state, with these changes to that of its first parameter."""
    optimizer = make(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0] = {**state["state"].get(0, {}), **changes}
    torch.save({"state_dict": {}, "optimizer_states": [state]}, path)
    return path


MAKERS = [partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.SGD, lr=0.1)]


@pytest.mark.parametrize("make", MAKERS, ids=["adamw", "sgd"])
def test_an_optimizers_state_as_it_was_saved_is_taken(make: partial, tmp_path: Path) -> None:
    model = Classifier(nn.Linear(2, 2), optimizer=make)
    check_optimizer(model, saved_after_a_step(nn.Linear(2, 2), make, tmp_path / "made.ckpt"))


def test_parameters_that_a_schedule_has_added_to_the_optimizer_are_left_to_it(tmp_path: Path) -> None:
    """Finetuning adds them in the course of a run, and again when that is resumed."""
    made = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    torch.save({"state_dict": {}, "optimizer_states": [optimizer.state_dict()]}, tmp_path / "made.ckpt")
    check_optimizer(Classifier(nn.Linear(2, 2), optimizer=MAKERS[0]), tmp_path / "made.ckpt")
    check_optimizer(Classifier(nn.Linear(2, 2, bias=False), optimizer=MAKERS[0]), tmp_path / "made.ckpt")


def test_arguments_that_the_optimizer_refuses_are_told_in_its_words() -> None:
    model = Classifier(nn.Linear(2, 2), optimizer=partial(torch.optim.AdamW, lr=-1.0))
    with pytest.raises(PolicyError, match=r"^optimizer: Invalid learning rate: -1\.0$"):
        check_optimizer(model, None)


def test_the_state_of_another_optimizer_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    model = Classifier(nn.Linear(2, 2), optimizer=MAKERS[1])
    path = saved_after_a_step(nn.Linear(2, 2), partial(torch.optim.Adagrad, lr=0.1), tmp_path / "made.ckpt")
    with pytest.raises(PolicyError, match="another optimizer than SGD: its state has no momentum, dampening"):
        check_optimizer(model, path)


def test_a_module_that_makes_its_optimizers_itself_is_not_checked(two_layers, tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "optimizer_states": []}, tmp_path / "made.ckpt")
    check_optimizer(two_layers, tmp_path / "made.ckpt")


LACKING = ("loops", "optimizer_states", "lr_schedulers", "pytorch-lightning_version")
WRONG: dict[str, tuple[Any, ...]] = {
    "loops": (3, {}, {"fit_loop": 3}, {"fit_loop": {"state_dict": {}}}),
    "optimizer_states": ({}, "none", [3], [{"state": {}}]),
    "lr_schedulers": (None, [3]),
    "pytorch-lightning_version": (3, "new"),
}


@pytest.fixture
def trained(make_trainer, two_layers, loader, tmp_path: Path) -> dict[str, Any]:
    """What the checkpoint of a run holds."""
    trainer = make_trainer(max_steps=1)
    trainer.fit(two_layers, loader)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    return torch.load(tmp_path / "own.ckpt", weights_only=True)


def test_a_run_goes_on_from_what_it_saved(trained, tmp_path: Path) -> None:
    check_resumable(tmp_path / "own.ckpt")


@pytest.mark.parametrize("name", LACKING)
def test_no_run_goes_on_from_a_checkpoint_that_lacks_something(trained, tmp_path: Path, name: str) -> None:
    del trained[name]
    torch.save(trained, path := tmp_path / "a.ckpt")
    with pytest.raises(PolicyError, match=rf"a\.ckpt holds no {name}: .*callbacks\.initial_weights\.path"):
        check_resumable(path)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_no_run_goes_on_from_a_state_of_another_kind(trained, tmp_path: Path, name: str, value: Any) -> None:
    torch.save({**trained, name: value}, path := tmp_path / "a.ckpt")
    with pytest.raises(PolicyError, match=rf"a\.ckpt holds {name} of another kind: .*initial_weights\.path"):
        check_resumable(path)
