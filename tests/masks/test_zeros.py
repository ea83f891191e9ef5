"""Zeros: what is 0 at the start stays 0."""

import copy

import pytest
import torch
from torch import nn

import gradpolicy as gp
from tests.fixtures import through_a_file


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture
def pruned() -> nn.Module:
    """A network of which 90 % of the weights are 0, and all biases."""
    model = network()
    with torch.no_grad():
        for layer in (model[0], model[3]):
            layer.weight.mul_(torch.rand_like(layer.weight) < 0.1)
            layer.bias.zero_()
    return model


def train(model: nn.Module, optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def zeros(model: nn.Module) -> list[torch.Tensor]:
    return [model[0].weight == 0, model[3].weight == 0]


@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
def test_no_zero_is_revived_and_all_others_train(pruned: nn.Module, frozen_state: str) -> None:
    before, values = zeros(pruned), copy.deepcopy(pruned)
    policy = gp.Freeze(gp.masks.Zeros(), frozen_state=frozen_state)
    with gp.training(pruned, adamw(pruned), [policy]) as optimizer:
        train(pruned, optimizer, range(20))
    assert all(map(torch.equal, zeros(pruned), before))
    assert not (pruned[0].weight == values[0].weight)[~before[0]].any()
    assert pruned[0].bias.all()


def test_a_resumed_run_keeps_the_zeros_of_its_start(pruned: nn.Module) -> None:
    policies = {"sparse": gp.Freeze(gp.masks.Zeros())}
    other, before = copy.deepcopy(pruned), zeros(pruned)
    with gp.training(pruned, adamw(pruned), copy.deepcopy(policies)) as optimizer:
        train(pruned, optimizer, range(10))
    with gp.training(other, adamw(other), copy.deepcopy(policies)) as optimizer:
        train(other, optimizer, range(5))
        weights, state = through_a_file((other.state_dict(), optimizer.state_dict()))
    resumed = network()
    with gp.training(resumed, adamw(resumed), copy.deepcopy(policies)) as optimizer:
        resumed.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(resumed, optimizer, range(5, 10))
    assert all(map(torch.equal, resumed.parameters(), pruned.parameters()))
    assert all(map(torch.equal, zeros(resumed), before))


def test_a_weight_that_is_0_as_a_whole_freezes_as_a_whole(prepared) -> None:
    source = prepared(gp.masks.Zeros(), {"w": torch.zeros(3, 4), "b": torch.zeros(3), "v": torch.ones(2, 2)})
    assert source.masks(0, 0) == {"w": False, "b": True, "v": True}
    assert source.may_freeze() == {"w"}


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_a_zero_is_warned_of(pruned: nn.Module) -> None:
    nn.init.ones_(pruned[0].weight)
    with (
        pytest.warns(UserWarning, match="Zeros: no entry of a matrix is 0"),
        gp.training(pruned, adamw(pruned), [gp.Freeze(gp.masks.Zeros(), params="0.*")]) as optimizer,
    ):
        train(pruned, optimizer, range(1))
