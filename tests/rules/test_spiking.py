import math

import pytest
import torch
from snntorch import surrogate

from gradpolicy import gradcheck_rule


def by_snntorch(spike, x):
    point = x.clone().requires_grad_()
    return torch.autograd.grad(spike(point).sum(), point)[0]


@pytest.mark.parametrize("slope", [25.0, 3.0])
def test_fast_sigmoid_agrees_with_snntorch(points, apply_rule, slope):
    expected = by_snntorch(surrogate.fast_sigmoid(slope=slope), points)
    torch.testing.assert_close(apply_rule("fast_sigmoid", points, slope=slope), expected)


@pytest.mark.parametrize("alpha", [2.0, 0.7])
def test_arctan_agrees_with_snntorch(points, apply_rule, alpha):
    expected = by_snntorch(surrogate.atan(alpha=alpha), points)
    torch.testing.assert_close(apply_rule("arctan", points, alpha=alpha), expected)


def test_the_defaults_are_snntorchs(points, apply_rule):
    for name, spike in (("fast_sigmoid", surrogate.fast_sigmoid()), ("arctan", surrogate.atan())):
        torch.testing.assert_close(apply_rule(name, points), by_snntorch(spike, points))


def test_triangular_is_a_triangle(points, apply_rule):
    x = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.25, 1.0, 3.0])
    assert apply_rule("triangular", x).tolist() == [0.0, 0.0, 0.5, 1.0, 0.75, 0.0, 0.0]
    torch.testing.assert_close(
        apply_rule("triangular", x, height=0.3, width=2.0),
        torch.tensor([0.0, 0.15, 0.225, 0.3, 0.2625, 0.15, 0.0]),
    )


def test_triangular_shuts_infinite_gradients_out_beyond_its_base(apply_rule):
    assert apply_rule("triangular", torch.tensor([2.0]), torch.tensor([math.inf])).item() == 0.0


@pytest.mark.parametrize(
    ("name", "smooth"),
    [
        ("fast_sigmoid", lambda x: x / (1 + 25 * x.abs())),
        ("arctan", lambda x: torch.arctan(math.pi * x) / math.pi),
    ],
)
def test_each_is_the_true_gradient_of_its_stand_in(name, smooth):
    assert gradcheck_rule(name, smooth, torch.tensor([-1.0, -0.2, 0.3, 2.0])).exact
