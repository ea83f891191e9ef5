import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpolicy import get_rule

AWKWARD = torch.tensor([1.5, -2.0, 0.0, math.inf, -math.inf, math.nan])


def test_stop_gives_exact_zeros_whatever_comes_in(apply_rule):
    assert apply_rule("stop", torch.ones(6), AWKWARD).tolist() == [0.0] * 6


@settings(max_examples=30)
@given(factor=st.floats(-1e3, 1e3), as_tensor=st.booleans())
def test_scale_and_reverse_multiply(factor, as_tensor):
    grad = torch.tensor([1.0, -0.5, 3.0], dtype=torch.float64)
    number = torch.tensor(factor, dtype=torch.float64) if as_tensor else factor
    expected = grad * factor
    torch.testing.assert_close(get_rule("scale", factor=number)(grad, (grad,), grad), expected)
    torch.testing.assert_close(get_rule("reverse", factor=number)(grad, (grad,), grad), -expected)


@pytest.mark.parametrize("factor", [0, 0.0, torch.tensor(0.0)])
def test_a_factor_of_zero_stops_infinite_gradients_too(apply_rule, factor):
    assert apply_rule("scale", torch.ones(6), AWKWARD, factor=factor).tolist() == [0.0] * 6
    assert apply_rule("reverse", torch.ones(6), AWKWARD, factor=factor).tolist() == [0.0] * 6


@pytest.mark.parametrize("std", [0.5, torch.tensor(0.5)])
def test_noise(apply_rule, std):
    grad = torch.full((200, 200), 3.0)
    draws = []
    for scale in (1.0, 1.0, 8.0):
        torch.manual_seed(3)
        draws.append(apply_rule("noise", grad, grad, std=std, loss_scale=scale) - 3.0)
    assert abs(draws[0].mean().item()) < 0.02
    assert abs(draws[0].std().item() - 0.5) < 0.02
    assert torch.equal(draws[0], draws[1])
    torch.testing.assert_close(draws[2], 8 * draws[0], rtol=1e-4, atol=1e-5)
