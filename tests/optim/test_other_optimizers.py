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
from gradpolicy.optim.update_rules import is_torchs_own
from tests.optim.alone import FROZEN_STATES, run_alone, without_rule

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


def warned(make, mask):
    weight, optimizer = masked(make)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.set_mask(weight, mask)
        optimizer.set_mask(weight, ~mask if isinstance(mask, torch.Tensor) else mask)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("name", KINDS)
def test_the_first_mask_on_some_entries_says_what_it_means(name):
    (line,) = warned(KINDS[name], HALF)
    assert line.startswith(f"{name} steps full tensors, and frozen entries are put back afterwards: ")
    own = is_torchs_own(masked(KINDS[name])[1].inner)
    assert ("zeros for frozen gradients and state" if own else "zeros for frozen gradients alone") in line
    assert "a step count is the full tensor's" in line
    assert warned(KINDS[name], False) == []


def test_one_with_a_rule_needs_no_word():
    assert warned(torch.optim.AdamW, HALF) == []


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
    with pytest.raises(PolicyError, match=f"{why}.*freeze full tensors"):
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
    assert line.startswith("half: Muon steps full tensors")
    assert planned(KINDS["Muon"], gp.Freeze(gp.masks.Random(0.5, level="tensor"))).warnings == ()
    (line,) = planned(KINDS["Muon"], gp.Freeze(gp.masks.Random(0.5, level="row"))).warnings
    assert line.startswith("half: Muon steps full tensors")
    assert planned(torch.optim.AdamW, gp.Freeze(gp.masks.Random(0.5))).warnings == ()


def test_the_plan_refuses_what_the_run_would_refuse():
    with pytest.raises(PolicyError, match=r"policy\.half: SOAP keeps"):
        planned(lambda weights: pytorch_optimizer.SOAP(list(weights)), gp.Freeze(gp.masks.Random(0.5)))


@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
@pytest.mark.parametrize("frozen_state", FROZEN_STATES)
def test_whole_tensors_are_exact_where_rows_are_refused(name, frozen_state):
    starts = [torch.randn(4, 3) for _ in range(2)]
    own, plain = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    make = getattr(pytorch_optimizer, name)
    optimizer, reference = gp.MaskedOptimizer(make(own, lr=0.1), frozen_state), make(plain, lr=0.1)
    for step in range(24):
        frozen = step // 4 % 3
        for place in range(2):
            if step % 4 == 0:
                optimizer.set_mask(own[place], frozen != place)
                if frozen == place and frozen_state != "keep":
                    reference.state.pop(plain[place], None)
            gradient = torch.randn(4, 3)
            own[place].grad = gradient.clone()
            plain[place].grad = None if frozen == place else gradient.clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(own, plain, atol=1e-6, rtol=1e-6)


# --- a step

MUON = {
    "rows": (torch.arange(6).view(6, 1) % 3 < 2).expand(6, 5),
    "columns": (torch.arange(5) % 2 == 0).expand(6, 5),
}


@pytest.mark.parametrize("name", MUON)
@pytest.mark.parametrize("settings", [{}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}])
def test_muon_orthogonalises_the_active_rows_alone(name, settings):
    """But for the rate, which follows from the shape of the whole matrix."""
    mask, generator = MUON[name], torch.Generator().manual_seed(0)
    shape = int(mask.any(1).sum()), int(mask.any(0).sum())
    scale = (6 / 5) ** 0.5 if not settings else 0.2 * 6**0.5
    own_scale = max(1, shape[0] / shape[1]) ** 0.5 if not settings else 0.2 * max(shape) ** 0.5
    weight = nn.Parameter(torch.randn(6, 5, generator=generator))
    optimizer = gp.MaskedOptimizer(torch.optim.Muon([weight], lr=0.1, weight_decay=0.0, **settings))
    weight.grad = torch.randn(6, 5, generator=generator)
    optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    optimizer.set_mask(weight, mask)
    part = nn.Parameter(weight.detach()[mask].view(shape))
    alone = torch.optim.Muon([part], lr=0.1 * scale / own_scale, weight_decay=0.0, **settings)
    alone.state[part]["momentum_buffer"] = momentum[mask].view(shape).clone()
    before, frozen = weight.detach().clone(), momentum[~mask].clone()
    for _ in range(3):
        weight.grad = torch.randn(6, 5, generator=generator)
        part.grad = weight.grad[mask].view(shape)
        optimizer.step()
        alone.step()
        # Newton-Schulz computes in bfloat16.
        torch.testing.assert_close(weight.detach()[mask].view(shape), part.detach(), atol=5e-3, rtol=0)
        assert torch.equal(weight.detach()[~mask], before[~mask])
        assert torch.equal(momentum[~mask], frozen)


@pytest.mark.parametrize("name", [name for name in KINDS if hasattr(torch.optim, name)])
def test_the_state_of_frozen_entries_counts_as_nothing_and_is_put_back(name):
    mask, generator = torch.rand(6, 5) < 0.5, torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.ones(6, 5)) for _ in range(2)]
    optimizers = [gp.MaskedOptimizer(KINDS[name]([weight])) for weight in weights]
    gradients = torch.randn(4, 6, 5, generator=generator)
    for step, gradient in enumerate(gradients):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            if step == 2:
                optimizer.set_mask(weight, mask)
            weight.grad = gradient.clone()
            optimizer.step()
        states = [optimizer.state[weight] for weight, optimizer in zip(weights, optimizers, strict=True)]
        if step == 1:
            of_entries = [key for key, value in states[0].items() if value.shape == mask.shape]
            kept = {key: states[0][key][~mask].clone() for key in of_entries}
            for key in of_entries:
                states[1][key][~mask] = torch.randn(int((~mask).sum()), generator=generator).abs()
    assert torch.equal(*weights)
    assert all(torch.equal(states[0][key][~mask], value) for key, value in kept.items())


def test_parameters_have_settings_of_their_own():
    weights = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    optimizer = gp.MaskedOptimizer(torch.optim.Muon(weights, lr=0.1, weight_decay=0.0))
    optimizer.set_masks(dict.fromkeys(weights, torch.arange(4).view(4, 1) < 2))
    optimizer.set_settings({weights[1]: {"lr": 0.5}})
    for weight in weights:
        weight.grad = torch.arange(12.0).view(4, 3)
    optimizer.step()
    first, second = (1 - weight.detach() for weight in weights)
    torch.testing.assert_close(second, 0.5 * first)
    assert first[:2].abs().min() > 0


def test_a_step_that_fails_leaves_groups_weights_and_state_as_they_were():
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = gp.MaskedOptimizer(torch.optim.Muon([weight], lr=0.1))
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    before, momentum = weight.detach().clone(), optimizer.state[weight]["momentum_buffer"]
    optimizer.set_mask(weight, mask := torch.arange(4).view(4, 1) < 2)
    optimizer.set_settings({weight: {"lr": 0.5}})
    kept = momentum.clone()
    optimizer.param_groups[0]["ns_coefficients"] = (1.0,)
    with pytest.raises(ValueError, match="Coefficients"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [weight]
    assert torch.equal(weight.detach(), before)
    assert torch.equal(momentum.masked_fill(mask, 0), kept.masked_fill(mask, 0))


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
