"""Optimizers without an update rule: how their state begins, and what masks on some entries mean."""

import warnings

import bitsandbytes
import pytest
import pytorch_optimizer
import torch
import torchao.optim
from lightning.pytorch import LightningModule
from torch import nn

import gradpolicy as gp
from gradpolicy import MaskedOptimizer
from gradpolicy.errors import PolicyError
from tests.optim.alone import run_alone, without_rule

HALF = torch.tensor([[True, False], [False, True]])
EXAMPLES = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.1),
    "Muon": lambda weights: torch.optim.Muon(weights, lr=0.1),
    "Lamb": lambda weights: pytorch_optimizer.Lamb(weights, lr=0.1),
    "Prodigy": lambda weights: pytorch_optimizer.Prodigy(weights),
    "MARS": lambda weights: pytorch_optimizer.MARS(weights, lr=1e-4),
}
KINDS = without_rule(EXAMPLES)


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


@pytest.mark.parametrize("name", KINDS)
def test_the_first_mask_on_some_entries_says_what_it_means(name):
    (line,) = warned(KINDS[name], HALF)
    assert line.startswith(f"{name} steps whole tensors, and frozen entries are put back afterwards: ")
    assert "and their state from earlier steps" in line
    (line,) = warned(KINDS[name], HALF, "zero")
    assert "a step count is the whole tensor's" in line
    assert warned(KINDS[name], False) == []


@pytest.mark.parametrize("state", ["keep", "zero", "drop"])
def test_one_with_a_rule_needs_no_word(state):
    assert warned(torch.optim.AdamW, HALF, state) == []


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (pytorch_optimizer.SOAP, "SOAP keeps its moments in a rotated basis"),
        (pytorch_optimizer.Shampoo, "Shampoo keeps statistics that mix all rows and all columns"),
        (pytorch_optimizer.ScalableShampoo, "ScalableShampoo keeps statistics"),
        (bitsandbytes.optim.AdamW8bit, "AdamW8bit keeps one scale for a block"),
        (torchao.optim.AdamW8bit, "AdamW8bit keeps one scale for a block"),
        (pytorch_optimizer.FlashAdamW, "FlashAdamW keeps one scale"),
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
    (line,) = planned(KINDS["Muon"], gp.Freeze(gp.masks.Random(0.5))).warnings
    assert line.startswith("half: Muon steps whole tensors")
    assert planned(KINDS["Muon"], gp.Freeze(gp.masks.Random(0.5, level="tensor"))).warnings == ()
    assert planned(KINDS["Muon"], gp.Freeze(gp.masks.Random(0.5, level="row"))).warnings == ()
    assert planned(torch.optim.AdamW, gp.Freeze(gp.masks.Random(0.5))).warnings == ()


def test_the_plan_refuses_what_the_run_would_refuse():
    with pytest.raises(PolicyError, match=r"policy\.half: SOAP keeps"):
        planned(lambda weights: pytorch_optimizer.SOAP(list(weights)), gp.Freeze(gp.masks.Random(0.5)))


# --- how state begins

ANCHORED = {
    "schedule_free": lambda weights: pytorch_optimizer.ScheduleFreeSGD(weights, lr=0.01),
    "madgrad": lambda weights: pytorch_optimizer.MADGRAD(weights, lr=0.01),
    "lookahead": lambda weights: pytorch_optimizer.Lookahead(torch.optim.SGD(weights, lr=0.01)),
}


@pytest.mark.supports("no update rule", loop="plain")
@pytest.mark.parametrize("kind", ANCHORED)
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
def test_entries_that_thaw_go_on_from_where_they_are(kind, frozen_state):
    weight = torch.nn.Parameter(torch.full((4, 6), 10.0))
    inner = ANCHORED[kind]([weight])
    optimizer = MaskedOptimizer(inner, frozen_state=frozen_state)
    if hasattr(inner, "train"):
        inner.train()
    mask = torch.arange(6).expand(4, 6) % 2 == 0
    for step, now in enumerate((mask, mask, ~mask, ~mask, None, None, mask[:1], None)):
        optimizer.set_mask(weight, now)
        before = weight.detach().clone()
        weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        # An anchor that began at 0 would pull by a tenth of the value and more.
        assert (weight - before).abs().max() < 0.5
        assert (weight != before)[optimizer.get_mask(weight).expand(4, 6)].all()


@pytest.mark.parametrize("shape", [(4, 6), (4, 1), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Rprop])
def test_state_that_does_not_begin_at_zero_begins_anew(kind, dtype, shape):
    settings = {"lr": 0.2} | ({"initial_accumulator_value": 0.3} if kind is torch.optim.Adagrad else {})
    start, gradients = torch.randn(4, 6, dtype=dtype), torch.randn(3, 4, 6, dtype=dtype)
    weight = torch.nn.Parameter(start.clone())
    # Torch goes by the constructor's accumulator, whatever a group says.
    group = {"params": [weight], "initial_accumulator_value": 7.0}
    optimizer = MaskedOptimizer(kind([group], **settings), frozen_state="zero")
    mask = (torch.arange(4).view(4, 1) + torch.arange(6))[: shape[0], : shape[1]] % 2 == 1
    masks = [torch.ones_like(mask), mask, torch.ones_like(mask)]
    for now, gradient in zip(masks, gradients, strict=True):
        optimizer.set_mask(weight, now)
        weight.grad = gradient.clone()
        optimizer.step()
    expected = run_alone(kind, settings, start, gradients, masks, "zero")
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_sam_gets_its_closure_for_both_of_its_passes():
    weight = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = MaskedOptimizer(pytorch_optimizer.SAM([weight], torch.optim.SGD, rho=0.5, lr=0.1))
    mask = torch.rand(5, 3) < 0.5
    optimizer.set_mask(weight, mask)
    before, plain, calls = weight.detach().clone(), [], []

    def closure():
        optimizer.zero_grad()
        loss = weight.pow(4).sum()
        loss.backward()
        calls.append(weight.detach().clone())
        plain.append(weight.grad.clone())
        return loss

    # As it is used: the gradient is there before the step, which asks for one more.
    closure()
    optimizer.step(closure)
    assert len(calls) == 2
    assert torch.equal(weight.detach() != before, mask)
    # The second pass is where the first one's masked gradient, made as long as rho, leads.
    masked = plain[0] * mask
    torch.testing.assert_close(calls[1], before + 0.5 * masked / masked.norm())
    torch.testing.assert_close(weight.detach(), torch.where(mask, before - 0.1 * plain[1], before))
