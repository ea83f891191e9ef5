"""Gradients that nobody needs are turned off, and nothing else."""

import pytest
import torch
from torch import nn

from gradpolicy.freezing.requires_grad import RequiresGrad

ALL = {
    "embed.weight",
    "head.weight",
    "head.bias",
    *(f"blocks.{i}.{k}" for i in range(4) for k in ("weight", "bias")),
}


def off(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


@pytest.fixture
def switch(stack) -> RequiresGrad:
    return RequiresGrad(dict(stack.named_parameters()), [set(stack.parameters())])


def test_exactly_the_idle_ones_are_off(stack, switch) -> None:
    for idle in ({"head.bias"}, {"head.weight", "embed.weight"}, set()):
        switch.turn_off(idle)
        assert off(stack) == idle


def test_what_others_turned_off_stays_off(stack, switch) -> None:
    stack.head.bias.requires_grad_(False)
    switch.turn_off({"head.bias", "head.weight"})
    switch.turn_off(set())
    assert off(stack) == {"head.bias"}
    switch.turn_off({"head.weight"})
    switch.restore()
    assert off(stack) == {"head.bias"}


def test_something_is_always_left_for_the_backward_pass(stack, switch) -> None:
    switch.turn_off({"head.bias"})
    switch.turn_off(ALL)
    assert off(stack) == set()
    stack.head.bias.requires_grad_(False)
    switch.turn_off(ALL - {"head.bias"})
    assert off(stack) == {"head.bias"}


def test_something_is_left_for_the_backward_pass_of_each_optimizer(stack) -> None:
    """Each may have a loss of its own, as in adversarial training."""
    named = dict(stack.named_parameters())
    head = set(stack.head.parameters())
    switch = RequiresGrad(named, [head, set(named.values()) - head])
    switch.turn_off({"head.weight", "head.bias", "embed.weight"})
    assert off(stack) == {"embed.weight"}
    switch.turn_off({"head.weight"})
    assert off(stack) == {"head.weight"}


def test_a_stale_gradient_goes_when_its_tensor_freezes(stack, switch) -> None:
    for parameter in stack.parameters():
        parameter.grad = torch.ones_like(parameter)
    switch.turn_off({"head.weight"})
    assert stack.head.weight.grad is None
    assert stack.head.bias.grad is not None
