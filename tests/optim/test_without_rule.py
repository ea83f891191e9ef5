"""Optimizers without an update rule: what masks on some entries mean is said, or refused."""

import warnings

import pytest
import pytorch_optimizer
import torch
from lightning.pytorch import LightningModule
from torch import nn

import gradpolicy as gp
from gradpolicy.errors import PolicyError

HALF = torch.tensor([[True, False], [False, True]])

MIXING = {
    "Adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.1),
    "Muon": lambda weights: torch.optim.Muon(weights, lr=0.1),
    "Shampoo": lambda weights: pytorch_optimizer.Shampoo(weights, lr=0.1),
    "ScalableShampoo": lambda weights: pytorch_optimizer.ScalableShampoo(weights, lr=0.1),
    "Lamb": lambda weights: pytorch_optimizer.Lamb(weights, lr=0.1),
    "Prodigy": lambda weights: pytorch_optimizer.Prodigy(weights),
    # Their names do not tell, and a step is short beside the weights.
    "StableAdamW": lambda weights: pytorch_optimizer.StableAdamW(weights, lr=1e-4),
    "MARS": lambda weights: pytorch_optimizer.MARS(list(weights), lr=1e-4),
}
BY_ENTRY = {
    "Adadelta": torch.optim.Adadelta,
    "Adadelta at a small rate": lambda weights: torch.optim.Adadelta(weights, lr=1e-5),
    "Rprop": torch.optim.Rprop,
    "SignSGD": pytorch_optimizer.SignSGD,
    "AdamW": torch.optim.AdamW,
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
}


class Blockwise8bit(torch.optim.SGD):
    """Is named like optimizers whose state has a scale for each block of entries."""

    def step(self, closure=None):
        return super().step(closure)


class Packs(torch.optim.Optimizer):
    """Keeps a byte for each two entries."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self.state[parameter]["momentum"] = torch.zeros(parameter.numel() // 2, dtype=torch.uint8)
                parameter.data -= group["lr"] * parameter.grad


def masked(make, state="keep"):
    weight = nn.Parameter(torch.ones(2, 2))
    return weight, gp.MaskedOptimizer(make([weight]), frozen_state=state)


def warned(make, mask, state="keep"):
    weight, optimizer = masked(make, state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.set_mask(weight, mask)
        optimizer.set_mask(weight, ~mask if isinstance(mask, torch.Tensor) else mask)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("name", MIXING)
def test_one_that_mixes_entries_is_named_once_with_what_putting_back_means(name):
    (line,) = warned(MIXING[name], HALF)
    assert line.startswith(f"{name} steps whole tensors, and frozen entries are put back afterwards: ")
    assert "what it keeps of them from earlier steps" in line
    (line,) = warned(MIXING[name], HALF, "zero")
    assert "what it keeps of them" not in line


@pytest.mark.parametrize("name", MIXING)
def test_a_mask_on_the_whole_tensor_needs_no_word(name):
    assert warned(MIXING[name], False) == []


@pytest.mark.parametrize("state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("name", BY_ENTRY)
def test_one_that_moves_each_entry_alone_needs_no_word(name, state):
    assert warned(BY_ENTRY[name], HALF, state) == []


def test_a_count_of_the_tensor_is_told_where_entries_lose_their_state():
    assert warned(torch.optim.Adamax, HALF, "keep") == []
    (line,) = warned(torch.optim.Adamax, HALF, "zero")
    assert "Adamax steps whole tensors" in line
    assert "an entry that thaws starts with empty state and an old count" in line


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda weights: pytorch_optimizer.SOAP(weights, lr=0.1),
            "SOAP keeps its moments in a rotated basis",
        ),
        (lambda weights: Blockwise8bit(weights, lr=0.1), "Blockwise8bit keeps one scale for a block"),
        (lambda weights: pytorch_optimizer.FlashAdamW(weights, lr=0.1), "FlashAdamW keeps one scale"),
        (Packs, "Packs keeps one scale for a block of entries"),
    ],
)
def test_state_without_a_value_for_each_entry_is_refused_but_for_whole_tensors(make, why):
    weight, optimizer = masked(make)
    with pytest.raises(PolicyError, match=f"{why}.*freeze whole tensors"):
        optimizer.set_mask(weight, HALF)
    weight, optimizer = masked(make)
    optimizer.set_mask(weight, False)
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weight, before)


class Module(LightningModule):
    def __init__(self, make):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


def planned(make, policy):
    return gp.plan(Module(make), {"half": policy}, lambda copy: copy.layer(torch.ones(1, 2)).sum())


def test_the_plan_says_it_too():
    (line,) = planned(MIXING["Muon"], gp.Freeze(gp.masks.Random(0.5))).warnings
    assert line.startswith("half: Muon steps whole tensors")
    assert planned(MIXING["Muon"], gp.Freeze(gp.masks.Random(0.5, level="tensor"))).warnings == ()
    assert planned(torch.optim.AdamW, gp.Freeze(gp.masks.Random(0.5))).warnings == ()


def test_the_plan_refuses_what_the_run_would_refuse():
    with pytest.raises(PolicyError, match=r"policy\.half: SOAP keeps"):
        planned(lambda weights: pytorch_optimizer.SOAP(list(weights)), gp.Freeze(gp.masks.Random(0.5)))
