"""Surrogates of steps, signs and spikes against their formulas, their stand-ins and snntorch."""

import pytest
import torch
from snntorch import surrogate


def swish_sign(beta):
    return lambda x: beta * (2 - beta * x * torch.tanh(beta * x / 2)) / (1 + torch.cosh(beta * x))


FORMULAS = [
    ("hardtanh", {}, lambda x: (x.abs() <= 1).double()),
    ("hardtanh", {"minimum": 0.0, "maximum": 6.0}, lambda x: ((x >= 0) & (x <= 6)).double()),
    ("tanh", {"slope": 4.0}, lambda x: 4 / torch.cosh(4 * x).square()),
    ("sigmoid", {"slope": 25.0}, lambda x: 25 / (2 + 2 * torch.cosh(25 * x))),
    ("approx_sign", {}, lambda x: torch.where(x.abs() <= 1, 2 - 2 * x.abs(), 0.0)),
    ("swish_sign", {}, swish_sign(5.0)),
    ("swish_sign", {"beta": 1.5}, swish_sign(1.5)),
    ("triangular", {}, lambda x: (1 - x.abs()).clamp(min=0.0)),
    ("triangular", {"height": 0.3, "width": 2.0}, lambda x: 0.3 * (1 - x.abs() / 2).clamp(min=0.0)),
]


@pytest.mark.parametrize(("name", "parameters", "formula"), FORMULAS)
def test_a_surrogate_follows_its_formula(points, apply_rule, name, parameters, formula):
    found = apply_rule(name, points, **parameters)
    torch.testing.assert_close(found, formula(points), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "parameters", "spike"),
    [
        ("fast_sigmoid", {}, surrogate.fast_sigmoid()),
        ("fast_sigmoid", {"slope": 3.0}, surrogate.fast_sigmoid(slope=3.0)),
        ("arctan", {}, surrogate.atan()),
        ("arctan", {"alpha": 0.7}, surrogate.atan(alpha=0.7)),
    ],
)
def test_a_surrogate_agrees_with_snntorch(points, apply_rule, name, parameters, spike):
    point = points.clone().requires_grad_()
    (expected,) = torch.autograd.grad(spike(point).sum(), point)
    torch.testing.assert_close(apply_rule(name, points, **parameters), expected)
