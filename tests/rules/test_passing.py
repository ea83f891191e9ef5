import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpolicy import get_rule

AWKWARD = torch.tensor([1.5, -2.0, 0.0, math.inf, -math.inf, math.nan])


def test_stop_gives_exact_zeros_whatever_comes_in(apply_rule):
    assert apply_rule("stop", torch.ones(6), AWKWARD).tolist() == [0.0] * 6


def test_stop_gives_zeros_of_each_inputs_own_shape_and_none_to_integers():
    inputs = (torch.ones(2, 3), torch.arange(4), torch.ones(5, dtype=torch.float64))
    first, second, third = get_rule("stop")(torch.ones(7), inputs, torch.ones(7))
    assert first.shape == (2, 3)
    assert second is None
    assert third.dtype == torch.float64


def test_identity_passes_the_very_gradient(apply_rule):
    grad = torch.randn(4)
    assert apply_rule("identity", torch.ones(4), grad) is grad


@settings(max_examples=30, deadline=None)
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


def test_reverse_turns_round_by_itself(apply_rule):
    assert apply_rule("reverse", torch.ones(2), torch.tensor([1.0, -3.0])).tolist() == [-1.0, 3.0]


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_single_precision_number_does_not_widen_a_half_precision_gradient(apply_rule, shape):
    grad = torch.ones(shape, dtype=torch.bfloat16)
    assert apply_rule("scale", grad, grad, factor=torch.tensor(0.5)).dtype == torch.bfloat16
