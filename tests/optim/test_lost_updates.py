import warnings

import pytest
import torch
from torch import nn

import gradpolicy as gp

LOST = "most updates are lost"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).bfloat16()


def trained(model, policies, lr=1e-5, **options):
    """Return the warnings of the plan and of a training about lost updates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    x = torch.randn(4, 8, dtype=next(model.parameters()).dtype)
    plan = gp.plan(model, policies, lambda copy: copy(x).square().sum(), optimizers=optimizer)
    with (
        warnings.catch_warnings(record=True) as caught,
        gp.training(model, optimizer, policies, **options) as own,
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            model(x).square().sum().backward()
            own.step()
            own.zero_grad()
    told = [str(each.message) for each in caught if LOST in str(each.message)]
    return [line for line in plan.warnings if LOST in line], told


def test_the_plan_and_a_training_warn_once(model):
    planned, told = trained(model, [gp.Freeze(gp.masks.Random(0.5))])
    assert len(planned) == len(told) == 1
    assert planned == told
    assert "master_weights=True" in told[0]
    assert "0.weight" in told[0]


def test_only_of_what_trains(model):
    planned, told = trained(model, [gp.Freeze(params="0.*")])
    assert planned == told
    assert "0.weight" not in told[0]


@pytest.mark.parametrize(
    ("dtype", "lr", "policy"),
    [
        (torch.bfloat16, 1e-5, gp.Freeze(gp.masks.Random(0.5), master_weights=True)),
        (torch.bfloat16, 1e-5, gp.Train(params="*.bias", master_weights=True)),
        (torch.bfloat16, 0.1, gp.Freeze(gp.masks.Random(0.5))),
        (torch.float32, 1e-5, gp.Freeze(gp.masks.Random(0.5))),
    ],
    ids=["freeze", "train", "large rate", "float32"],
)
def test_not_where_none_are_lost(model, dtype, lr, policy):
    assert trained(model.to(dtype), [policy], lr) == ([], [])


def test_not_with_master_weights_for_the_training(model):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    _, told = trained(model, [gp.Freeze(params="0.bias")], master_weights=True)
    assert not told
    assert torch.equal(before[1], model[0].bias)
