"""A stop that leaves nothing that trains with a gradient is named."""

import pytest
import torch
from torch import nn

import gradpolicy as gp

NAMED = r"policy 'cut' \(Stop at (input|output) of modules 2\) cuts the only path"


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def loss_of(model):
    return model(torch.ones(3, 4)).sum()


def test_the_plan_and_a_block_name_the_stop_that_cuts_the_only_path(model):
    policies = {"cut": gp.Stop(modules="2", at="output")}
    with pytest.raises(gp.PolicyError, match=NAMED):
        gp.plan(model, policies, loss_of)
    with pytest.raises(gp.PolicyError, match=NAMED), gp.install(model, policies):
        loss_of(model).backward()


def test_what_is_frozen_behind_the_cut_is_no_path(model):
    cut = gp.Stop(modules="2")
    assert gp.plan(model, {"cut": cut}, loss_of).training_entries == 10
    with pytest.raises(gp.PolicyError, match=NAMED):
        gp.plan(model, {"cut": cut, "head": gp.Freeze(False, params="2.*")}, loss_of)


def test_another_error_of_torch_is_left_as_it_is(model):
    with torch.no_grad():
        loss = loss_of(model)
    with (
        pytest.raises(RuntimeError, match="does not require grad"),
        gp.install(model, [gp.Stop(modules="2")]),
    ):
        loss.backward()
