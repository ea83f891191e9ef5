"""Factors on gradients that an optimizer divides out again are told."""

import re

import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.factors import divides_out


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_an_optimizer_that_is_said_to_divide_does_so(kind):
    assert divides_out(kind([nn.Parameter(torch.zeros(1))]))
    ends = []
    for factor in (1.0, 0.01):
        weight = nn.Parameter(torch.zeros(3))
        optimizer = kind([weight], lr=0.1)
        for gradient in torch.randn(4, 3, generator=torch.Generator().manual_seed(0)):
            weight.grad = factor * gradient
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


def warnings_of(model, policies, **arguments):
    return gp.plan(model, policies, lambda copy: copy(torch.ones(3, 4)).sum(), **arguments).warnings


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (gp.Scale(0.1, params="*"), r"the factor 0.1 .*gradpolicy\.Rates"),
        (gp.Scale(lambda step: 0.5**step, params="*"), "the scheduled factor"),
        (gp.Reverse(0.1, params="*"), "the factor 0.1"),
    ],
)
def test_the_plan_names_the_optimizer_and_what_to_write_instead(policy, text):
    model = nn.Linear(4, 2)
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters()))
    (warning,) = warnings_of(model, {"own": policy}, optimizers=optimizer)
    assert re.match(rf"own: AdamW divides {text}", warning)
    assert warnings_of(model, {"own": policy}, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)) == ()
    assert warnings_of(model, {"own": policy}) == ()
