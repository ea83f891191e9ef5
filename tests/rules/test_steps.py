"""Surrogates for a step at 0, put on operations that step elsewhere."""

import pytest
import torch

import gradpolicy as gp

SURROGATES = {
    "tanh": {"slope": 3.0},
    "sigmoid": {"slope": 4.0},
    "fast_sigmoid": {"slope": 5.0},
    "arctan": {"alpha": 2.0},
    "triangular": {"width": 0.3},
    "approx_sign": {},
    "swish_sign": {"beta": 3.0},
}
# Steps of each operation.
AT_INTEGERS, NOT_AT_ZERO = [-3.0, -1.0, 0.0, 2.0], [-3.0, -1.0, 1.0, 2.0]
STEPS = {
    "round": ([-2.5, -0.5, 0.5, 1.5, 7.5], torch.round),
    "floor": (AT_INTEGERS, torch.floor),
    "ceil": (AT_INTEGERS, torch.ceil),
    "trunc": (NOT_AT_ZERO, torch.trunc),
    "int": (NOT_AT_ZERO, lambda x: x.int().float()),
    "long": (NOT_AT_ZERO, lambda x: x.to(torch.int64) * 1.0),
    "floor_divide": ([-4.0, 0.0, 2.0], lambda x: torch.floor_divide(x, 2.0)),
    "sign": ([0.0, 0.0], torch.sign),
}


def gradient(operation, rule, x):
    x = x.clone().requires_grad_()
    with gp.gradient_override({operation: rule}):
        y = STEPS[operation][1](x)
    return torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize("operation", STEPS)
@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_acts_at_the_nearest_step(name, operation):
    rule, distances = gp.get_rule(name, **SURROGATES[name]), torch.tensor([-0.4, -0.1, 0.0, 0.2])
    x = torch.tensor(STEPS[operation][0]).unsqueeze(1) + distances
    found = gradient(operation, rule, x)
    expected = rule(torch.ones(4), (distances,), torch.zeros(4))
    torch.testing.assert_close(found, expected.expand_as(x), rtol=2e-4, atol=2e-5)
