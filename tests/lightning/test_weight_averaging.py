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
def test_beside_masks_that_change_it_is_refused_before_the_first_step(
    two_layers, loader, make_trainer, policies, averaging
):
    before = [parameter.clone() for parameter in two_layers.parameters()]
    trainer = make_trainer(max_steps=2, callbacks=[averaging, gp.GradientPolicies(policies)])
    with pytest.raises(PolicyError, match=rf"policy\.\w+: {type(averaging).__name__} averages over steps"):
        trainer.fit(two_layers, loader)
    assert all(torch.equal(*pair) for pair in zip(before, two_layers.parameters(), strict=True))


def test_an_exponential_average_that_rounds_is_refused_with_one_that_does_not(
    two_layers, loader, make_trainer
):
    policies = gp.GradientPolicies({"still": still()})
    trainer = make_trainer(max_steps=2, callbacks=[EMAWeightAveraging(decay=0.9), policies])
    with pytest.raises(PolicyError, match=r"use WeightAveraging\(multi_avg_fn="):
        trainer.fit(two_layers, loader)


@pytest.mark.parametrize(
    "averaging",
    [
        WeightAveraging(),
        WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
        StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
    ],
    ids=["mean", "exponential", "swa"],
)
def test_averages_of_entries_that_are_always_frozen_keep_their_bits(
    two_layers, loader, make_trainer, averaging
):
    callback = gp.GradientPolicies({"still": still()})
    before = {name: parameter.detach().clone() for name, parameter in two_layers.named_parameters()}
    trainer = make_trainer(max_epochs=4, callbacks=[averaging, callback])
    trainer.fit(two_layers, loader)
    for name, parameter in two_layers.trunk.named_parameters(prefix="trunk"):
        frozen = ~callback.masked_optimizers[0].get_mask(parameter).expand_as(parameter)
        assert frozen.any()
        assert torch.equal(parameter[frozen], before[name][frozen])
        assert not torch.equal(parameter, before[name])


def test_without_freeze_policies_averages_are_taken(two_layers, loader, make_trainer):
    callbacks = [EMAWeightAveraging(decay=0.9), gp.GradientPolicies({"cut": gp.Stop(modules="head")})]
    make_trainer(max_steps=2, callbacks=callbacks).fit(two_layers, loader)
