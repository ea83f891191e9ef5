"""Rules that change nothing, or make no sense, where they are put."""

import pytest
import torch
from torch import nn

import gradpolicy as gp


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def planned(model, **policies):
    return gp.plan(model, policies, lambda copy: copy(torch.ones(3, 4)).sum())


@pytest.mark.parametrize("rule", ["identity", "rotation", "reinmax", "gumbel", "bernoulli", "lsq"])
@pytest.mark.parametrize("where", [{"modules": "2"}, {"modules": "2", "at": "output"}, {"params": "2.*"}])
def test_a_rule_of_an_operation_is_refused_elsewhere_with_what_to_write(model, rule, where):
    policy = gp.UseRule(rule, **where)
    for attempt in (lambda: gp.install(model, {"vq": policy}), lambda: planned(model, vq=policy)):
        with pytest.raises(gp.PolicyError, match=rf"policy 'vq': rule '{rule}' .*2.*ops=.*gradpolicy\.apply"):
            attempt()
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("policy", [gp.Scale(1.0, modules="2"), gp.Reverse(-1.0, params="2.*")])
def test_a_neutral_factor_is_a_line_of_the_plan(model, policy):
    (warning,) = planned(model, slow=policy).warnings
    assert warning.startswith("slow: a factor of")
    assert "changes nothing" in warning


def test_a_rule_that_reads_inputs_at_a_boundary_is_a_line_of_the_plan(model):
    (warning,) = planned(model, soft=gp.UseRule("tanh", modules="2")).warnings
    assert "soft: rule 'tanh' reads inputs" in warning
    assert "ops=" in warning


@pytest.mark.parametrize(
    "policy",
    [
        gp.Scale(0.5, modules="2"),
        gp.Scale(lambda step: 1.0 + step, modules="2"),
        gp.Clip(norm=1.0, modules="2"),
        gp.UseRule("tanh", ops="relu"),
    ],
)
def test_what_has_an_effect_gives_no_warning(model, policy):
    assert planned(model, own=policy).warnings == ()


def test_changing_the_gradient_of_a_step_is_a_line_of_the_plan():
    class Rounds(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            features = self.linear(x)
            return torch.round(features) + torch.relu(features)

    (warning,) = planned(Rounds(), slow=gp.Scale(0.5, ops=[torch.round, "add"])).warnings
    assert warning.startswith("slow: the own gradient of 'round' is 0")
    assert "StraightThrough" in warning
    assert planned(Rounds(), cut=gp.Stop(ops=["round"])).warnings == ()
