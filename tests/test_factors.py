"""Factors on gradients that an optimizer divides out again are told."""

import re

import pytest
import torch
from torch import nn

import gradpolicy as gp


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
