"""Callbacks that average weights are refused where they would move frozen entries."""

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn

import gradpolicy as gp
from gradpolicy.errors import PolicyError

CHANGING = {"half": gp.Freeze(gp.masks.Random(0.5, every=1), params="trunk.*")}
LATER = {"late": gp.Freeze(gp.masks.Fixed(False), params="trunk.*", when=gp.When(start=2))}


def still():
    return gp.Freeze(gp.masks.Random(0.5, every=None), params="trunk.*")


AVERAGING = [
    EMAWeightAveraging(decay=0.9),
    StochasticWeightAveraging(swa_lrs=0.01),
    WeightAveraging(),
    WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
]


@pytest.mark.parametrize("policies", [CHANGING, LATER])
@pytest.mark.parametrize("averaging", AVERAGING, ids=lambda each: type(each).__name__)
def test_beside_masks_that_change_it_is_refused_before_the_first_step(two_layers, train, policies, averaging):
    before = [parameter.clone() for parameter in two_layers.parameters()]
    with pytest.raises(PolicyError, match=rf"policy\.\w+: {type(averaging).__name__} averages over steps"):
        train(averaging, policies, max_steps=2)
    assert all(torch.equal(*pair) for pair in zip(before, two_layers.parameters(), strict=True))


def test_an_exponential_average_that_rounds_is_refused_with_one_that_does_not(train):
    with pytest.raises(PolicyError, match=r"use WeightAveraging\(multi_avg_fn="):
        train(EMAWeightAveraging(decay=0.9), {"still": still()}, max_steps=2)


@pytest.mark.parametrize(
    "averaging",
    [
        WeightAveraging(),
        WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
        StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
    ],
    ids=["mean", "exponential", "swa"],
)
def test_averages_of_entries_that_are_always_frozen_keep_their_bits(two_layers, train, averaging):
    callback = gp.GradientPolicies({"still": still()})
    before = {name: parameter.detach().clone() for name, parameter in two_layers.named_parameters()}
    train(averaging, callback, max_epochs=4)
    for name, parameter in two_layers.trunk.named_parameters(prefix="trunk"):
        frozen = ~callback.run.steps.masked[0].get_mask(parameter).expand_as(parameter)
        assert frozen.any()
        assert torch.equal(parameter[frozen], before[name][frozen])
        assert not torch.equal(parameter, before[name])


def test_without_freeze_policies_averages_are_taken(train):
    trainer = train(EMAWeightAveraging(decay=0.9), {"cut": gp.Stop(modules="head")}, max_steps=2)
    assert trainer.global_step == 2
