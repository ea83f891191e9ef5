"""Warnings of tensors that train without a gradient."""

import warnings

import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.train.training_run import Run


class Branches(nn.Module):
    """Of three layers the loss depends on those that are used."""

    def __init__(self, used=("a", "c")):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.used = used

    def forward(self, x):
        for name in self.used:
            x = getattr(self, name)(x)
        return x.sum()


def told(model, policies, steps, each_step=lambda model, step: None, ends=True, run=None):
    """What warnings a training gives."""
    run = run or Run(policies, layers=False)
    (optimizer,) = run.install(model, [torch.optim.AdamW(model.parameters(), lr=0.05)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            each_step(model, step)
            run.begin()
            model(torch.ones(1, 2)).backward()
            run.gradients(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        if ends:
            run.remove()
            run.remove()
    reasons = ("no gradient gets there", "only zeros get there")
    messages = [str(each.message) for each in caught]
    return [message for message in messages if any(reason in message for reason in reasons)]


def in_turn(every):
    return gp.Freeze(gp.masks.BlockCyclic(groups=["b.*", "c.*"], every=every), params=["b.*", "c.*"])


def test_a_tensor_whose_mask_leaves_no_row_is_not_named():
    no_rows = gp.Freeze(lambda name, parameter, step: torch.zeros(2, 1, dtype=torch.bool), params="b.weight")
    assert told(Branches(used=("a", "b", "c")), {"rows": no_rows}, 30) == []


@pytest.mark.parametrize(("steps", "ends"), [(4, False), (4, True), (30, True)])
def test_a_thawed_layer_without_a_gradient_is_named_once_when_it_freezes_again(steps, ends):
    assert told(Branches(), {"turns": in_turn(3)}, 3, ends=False) == []
    (message,) = told(Branches(), {"turns": in_turn(3)}, steps, ends=ends)
    assert message.startswith("policy.turns: lets b.weight, b.bias train, but no gradient gets there")


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (in_turn(3), "b.*"),
        (gp.Freeze(gp.masks.Gradual(every=3, unit="step")), "b"),
        (gp.Rates({"*": gp.LayerDecay(0.5)}), "b"),
        (gp.Freeze(gp.masks.Gradual(), params=["a.*", "c.*"]), ""),
        (gp.Freeze(gp.masks.Random(0.5)), ""),
    ],
)
def test_a_policy_that_counts_a_layer_without_a_gradient_is_named(policy, name):
    (message,) = told(Branches(), {"own": policy}, 10)
    clause = f"policy.own counts {name} as a layer: exclude it (!…)"
    assert clause in message if name else "counts" not in message


def test_what_a_plan_has_named_is_not_named_again():
    policies = {"own": gp.Freeze(gp.masks.Gradual(every=1, unit="step"))}
    planned = gp.plan(Branches(), policies, lambda copy: copy(torch.ones(1, 2)))
    assert sum("b.weight" in line for line in planned.warnings) > 0
    run = Run(policies)
    run.notices.do_not_repeat(planned)
    assert told(Branches(), policies, 3, run=run) == []
    assert len(told(Branches(), policies, 3)) == 1


def test_it_is_named_after_a_hundred_updates_where_masks_stay():
    policies = {"all": gp.Freeze(gp.masks.Fixed(["a.*", "b.*"]))}
    assert told(Branches(), policies, 99, ends=False) == []
    assert len(told(Branches(), policies, 100, ends=False)) == 1


def test_a_gradient_that_stays_away_later_is_noticed():
    def stop_using(model, step):
        model.used = ("a", "c") if step < 50 else ("a",)

    policies = {"all": gp.Freeze(gp.masks.Fixed(["a.*", "c.*"]))}
    assert told(Branches(), policies, 199, stop_using, ends=False) == []
    (message,) = told(Branches(), policies, 200, stop_using, ends=False)
    assert "lets c.weight, c.bias train" in message


def test_what_is_frozen_or_gets_its_gradient_is_not_named():
    policies = {"rest": gp.Freeze(gp.masks.Fixed(["a.*", "c.weight"]))}
    assert told(Branches(), policies, 110) == []
    assert told(Branches(("a", "b", "c")), {"turns": in_turn(2)}, 110) == []


def test_a_frozen_weight_with_two_names_is_not_named():
    model = Branches(("a", "b", "c"))
    model.c.weight = model.a.weight
    assert told(model, {"biases": gp.Train(params="*.bias")}, 3) == []


def test_a_gradient_of_zeros_alone_is_named_with_its_reason():
    class Rounded(Branches):
        def forward(self, x):
            return (self.a(x).round() + self.b(x) + self.c(x)).sum()

    policies = {"half": gp.Freeze(gp.masks.Random(0.5), params=["a.*", "c.*"])}
    assert told(Rounded(), policies, 3, ends=False) == []
    (message,) = told(Rounded(), policies, 3)
    assert message.startswith("policy.half: lets a.weight, a.bias train, but only zeros")


def test_zeros_at_first_are_no_reason_for_a_warning():
    """As under an output layer that starts at zero, which passes no gradient until its first step."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    nn.init.zeros_(model[1].weight)
    forward = model.forward
    model.forward = lambda x: forward(x).sum()
    policies = {"all": gp.Freeze(gp.masks.Random(0.9, every=1))}
    assert told(model, policies, 5) == []


@pytest.mark.parametrize(
    "policy",
    [gp.Scale(1.0, modules="c"), gp.Rates({"a.*": 0.1}), gp.Freeze(gp.masks.Random(0.5), params="a.*")],
)
def test_what_no_freeze_policy_matches_is_named_too_in_training_and_in_the_plan(policy):
    (message,) = told(Branches(), {"own": policy}, 3)
    assert message.startswith("b.weight, b.bias train, but no gradient gets there")
    planned = gp.plan(Branches(), {"own": policy}, lambda copy: copy(torch.ones(1, 2)))
    (message,) = planned.warnings
    assert message.startswith("b.weight, b.bias train, but get no gradient")
