"""Masks may take any course: however many ages there come to be, each entry keeps its own."""

import copy
import random

import pytest
import torch

import gradpolicy as gp
from tests.optim.alone import run_alone

SHAPE = (150, 2)
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.98)}
FROZEN_STATES = ["keep", "zero", "drop"]


def growing(count):
    """Masks of which each lets one entry more train, so that each entry comes to an age of its own."""
    order = torch.randperm(SHAPE[0] * SHAPE[1])
    for size in range(1, count + 1):
        mask = torch.zeros(order.numel(), dtype=torch.bool)
        mask[order[:size]] = True
        yield mask.view(SHAPE)


def at_random(count, choose):
    """Masks of entries, rows or the whole tensor, at times the same again, or none."""
    mask = torch.ones(SHAPE, dtype=torch.bool)
    for _ in range(count):
        share = choose.choice([0.02, 0.5, 0.98])
        level = choose.choice(["entry", "row", "column", "all", "nothing", "same", "none"])
        shapes = {"entry": SHAPE, "row": (SHAPE[0], 1), "column": (1, SHAPE[1])}
        if level in shapes:
            mask = torch.rand(shapes[level]) < share
        elif level in ("all", "nothing"):
            mask = torch.tensor(level == "all")
        yield None if level == "none" else mask


class Follower:
    """Steps a masked Adam, and notes what a reference needs."""

    def __init__(self, frozen_state, bias_correction):
        self.forgets = frozen_state != "keep"
        self.weight = torch.nn.Parameter(torch.randn(SHAPE, dtype=torch.float64))
        self.start = self.weight.detach().clone()
        inner = torch.optim.Adam([self.weight], **SETTINGS)
        self.optimizer = gp.MaskedOptimizer(inner, frozen_state=frozen_state, bias_correction=bias_correction)
        self.ages = torch.zeros(SHAPE, dtype=torch.int64)
        self.gradients, self.masks = [], []

    def step(self, mask):
        self.optimizer.set_mask(self.weight, mask)
        mask = torch.ones(SHAPE, dtype=torch.bool) if mask is None else mask.expand(SHAPE)
        before, gradient = self.weight.detach().clone(), torch.randn(SHAPE, dtype=torch.float64)
        if self.forgets:
            self.ages *= mask
        self.weight.grad = gradient.clone()
        self.optimizer.step()
        self.ages += mask
        self.gradients.append(gradient)
        self.masks.append(mask)
        assert torch.equal(self.optimizer.age(self.weight).expand(SHAPE), self.ages)
        assert torch.equal(self.optimizer.get_mask(self.weight).expand(SHAPE), mask)
        assert torch.equal(self.weight.detach()[~mask], before[~mask])

    def check_entries(self, count):
        """Compares entries with torch's own Adam run on each alone."""
        chosen = torch.randperm(self.start.numel())[:count]
        picked = [
            [tensor.reshape(-1)[chosen] for tensor in tensors] for tensors in (self.gradients, self.masks)
        ]
        frozen_state = self.optimizer.frozen_state
        expected = run_alone(torch.optim.Adam, SETTINGS, self.start.view(-1)[chosen], *picked, frozen_state)
        found = self.weight.detach().view(-1)[chosen]
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)

    def check_tensor(self):
        """Compares all with torch's own Adam, after each of whose steps frozen entries are put back."""
        weight = torch.nn.Parameter(self.start.clone())
        optimizer = torch.optim.Adam([weight], **SETTINGS)
        moments = ("exp_avg", "exp_avg_sq")
        state = {}
        for gradient, mask in zip(self.gradients, self.masks, strict=True):
            before = [weight.detach().clone(), *(state[key].clone() for key in moments if state)]
            if self.forgets and state:
                before[1:] = [moment * mask for moment in before[1:]]
                for key, moment in zip(moments, before[1:], strict=True):
                    state[key].copy_(moment)
            if not mask.any():
                continue
            weight.grad = gradient.clone()
            optimizer.step()
            state = optimizer.state[weight]
            after = [weight.detach(), *(state[key] for key in moments)]
            before += [torch.zeros(SHAPE, dtype=torch.float64)] * (3 - len(before))
            for value, old in zip(after, before, strict=True):
                value.copy_(torch.where(mask, value, old))
        torch.testing.assert_close(self.weight.detach(), weight.detach(), atol=1e-10, rtol=1e-10)


def few_of_many():
    """Masks of rows and of the whole tensor, which leave few ages where there were many."""
    half = torch.arange(SHAPE[0]).view(-1, 1) % 2 == 0
    return half, ~half, half.expand(SHAPE), torch.tensor(False), None


@pytest.mark.parametrize(
    ("kernels", "frozen_state"),
    [("native", "keep"), ("native", "zero"), ("native", "drop"), ("reference", "keep")],
)
def test_many_ages_are_followed_by_few(kernels, frozen_state, use):
    """Whatever number stands for an age must find room where there are fewer of them again."""
    use(kernels)
    follower = Follower(frozen_state, "entry")
    for mask in (*growing(131), *few_of_many(), *at_random(8, random.Random(0))):
        follower.step(mask)
    follower.check_entries(4)


def test_many_ages_by_the_count_of_the_tensor():
    follower = Follower("zero", "tensor")
    for mask in (*growing(131), *few_of_many(), *at_random(8, random.Random(0))):
        follower.step(mask)
    follower.check_tensor()


@pytest.mark.slow
@pytest.mark.parametrize("bias_correction", ["entry", "tensor"])
@pytest.mark.parametrize("frozen_state", FROZEN_STATES)
def test_any_course_of_masks_at_random(frozen_state, bias_correction, kernels):
    choose = random.Random(f"{kernels} {frozen_state} {bias_correction}")
    follower = Follower(frozen_state, bias_correction)
    for _ in range(3):
        for mask in (*growing(choose.choice([127, 128, 129, 255, 256, 257])), *at_random(30, choose)):
            follower.step(mask)
    if bias_correction == "entry":
        follower.check_entries(20)
    else:
        follower.check_tensor()


@pytest.mark.slow
def test_any_course_of_masks_past_the_numbers_of_two_bytes(kernels):
    """Each entry comes to an age of its own in few changes of masks: its number's bits say when it trains."""
    count = (1 << 15) + 1
    numbers = torch.arange(count)
    weight = torch.nn.Parameter(torch.zeros(count))
    optimizer = gp.MaskedOptimizer(torch.optim.Adam([weight], **SETTINGS), frozen_state="keep")
    weight.grad = torch.ones(count)
    for span in (1 << place for place in reversed(range(15))):
        optimizer.set_mask(weight, numbers.clamp(max=count - 2) & span > 0)
        for _ in range(span):
            optimizer.step()
    optimizer.set_mask(weight, numbers == count - 1)
    optimizer.step()
    assert torch.equal(optimizer.age(weight), numbers)
    for frozen_state in FROZEN_STATES:
        check_a_course_of_masks(*copy.deepcopy((optimizer, weight)), frozen_state)


def check_a_course_of_masks(optimizer, weight, frozen_state):
    """From entries that each have another age on."""
    numbers = torch.arange(weight.numel())
    ages, updates, weight.grad = numbers.clone(), numbers.clone(), torch.ones(weight.numel())
    for mask in (None, numbers % 2 == 0, numbers % 3 == 0, numbers < 100, torch.tensor(False), None):
        optimizer.set_mask(weight, mask, frozen_state=frozen_state)
        optimizer.step()
        mask = torch.ones(numbers.shape, dtype=torch.bool) if mask is None else mask.expand(numbers.shape)
        ages = (ages if frozen_state == "keep" else ages * mask) + mask
        updates += mask
        assert torch.equal(optimizer.age(weight).expand(numbers.shape), ages)
    # Under a constant gradient each of Adam's steps is as long as the learning rate.
    torch.testing.assert_close(weight.detach(), -SETTINGS["lr"] * updates, atol=0.0, rtol=1e-3)
