import math

import pytest
import torch

from gradpolicy import gradcheck_rule


def test_approx_sign_follows_larqs_formula(points, apply_rule):
    expected = torch.where(points.abs() <= 1, 2 - 2 * points.abs(), 0.0)
    torch.testing.assert_close(apply_rule("approx_sign", points), expected)


@pytest.mark.parametrize("beta", [5.0, 1.5])
def test_swish_sign_follows_larqs_formula(points, apply_rule, beta):
    z = beta * points
    expected = beta * (2 - z * torch.tanh(z / 2)) / (1 + torch.cosh(z))
    torch.testing.assert_close(apply_rule("swish_sign", points, beta=beta), expected, rtol=1e-9, atol=1e-30)


def test_swish_sign_is_the_derivative_of_sign_swish():
    def sign_swish(x):
        gate = torch.sigmoid(5 * x)
        return 2 * gate * (1 + 5 * x * (1 - gate)) - 1

    assert gradcheck_rule("swish_sign", sign_swish, torch.tensor([-1.0, -0.3, 0.1, 0.7])).exact


def test_approx_sign_is_the_derivative_of_a_piecewise_parabola():
    def parabola(x):
        return torch.where(x < 0, 2 * x + x.square(), 2 * x - x.square())

    assert gradcheck_rule("approx_sign", parabola, torch.tensor([-0.9, -0.3, 0.1, 0.7])).exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_far_from_zero_nothing_overflows(apply_rule, dtype):
    x = torch.tensor([-math.inf, -1e4, 1e4, math.inf], dtype=dtype)
    assert apply_rule("swish_sign", x).abs().max() < 1e-6
    assert apply_rule("approx_sign", x).abs().max() == 0
