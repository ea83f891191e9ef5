"""Policies that change nothing, make no sense where they are put, or cut all gradients off."""

import re

import pytest
import torch
from torch import nn

import gradpolicy as gp


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def loss_of(model):
    return model(torch.ones(3, 4)).sum()


def planned(model, **policies):
    return gp.plan(model, policies, loss_of)


@pytest.mark.parametrize("rule", ["identity", "rotation", "reinmax", "gumbel", "bernoulli", "lsq"])
@pytest.mark.parametrize("where", [{"modules": "2"}, {"modules": "2", "at": "output"}, {"params": "2.*"}])
def test_rules_of_operations_are_refused_elsewhere(model, rule, where):
    policy = gp.UseRule(rule, **where)
    for attempt in (lambda: gp.install(model, {"vq": policy}), lambda: planned(model, vq=policy)):
        with pytest.raises(gp.PolicyError, match=rf"policy 'vq': rule '{rule}' .*2.*ops=.*gradpolicy\.apply"):
            attempt()
    assert "forward" not in model.__dict__


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (gp.Scale(0.5, ops=[torch.round, "add"]), "it: the own gradient of 'round' is 0.*StraightThrough"),
        (gp.Stop(ops=["round"]), None),
        (gp.UseRule("tanh", ops="relu"), None),
    ],
)
def test_plan_names_operations_without_a_gradient(model, policy, message, as_module):
    model.append(as_module(lambda x: x + torch.round(x) + torch.relu(x)))
    warnings = planned(model, it=policy).warnings
    assert len(warnings) == (message is not None)
    assert all(re.match(message, warning) for warning in warnings)


def test_a_stop_that_cuts_all_off_leaves_no_graph(model):
    cut = gp.Stop(modules="2", at="output")
    assert planned(model, cut=cut).training_entries == 0
    with pytest.raises(RuntimeError, match="does not require grad"), gp.install(model, {"cut": cut}):
        loss_of(model).backward()


def test_the_plan_knows_what_trains_behind_a_stop(model):
    cut = gp.Stop(modules="2")
    assert planned(model, cut=cut).training_entries == 10
    assert planned(model, cut=cut, head=gp.Freeze(False, params="2.*")).training_entries == 0
