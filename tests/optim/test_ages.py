"""However many updates entries have had, each keeps its own age."""

import copy

import pytest
import torch

import gradpolicy as gp

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.98)}


@pytest.mark.slow
def test_any_course_of_masks_past_the_numbers_of_two_bytes(device):
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
    for frozen_state in ("keep", "zero", "drop"):
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
