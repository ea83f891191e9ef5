import pytest
import torch
from torch.nn import functional

from gradpolicy import gradcheck_rule


def test_hardtanh_passes_within_the_range_ends_included(points, apply_rule):
    expected = (points.abs() <= 1).double()
    assert torch.equal(apply_rule("hardtanh", points), expected)


def test_hardtanh_takes_another_range(apply_rule):
    x = torch.tensor([-0.5, 0.0, 5.9, 6.1])
    assert apply_rule("hardtanh", x, minimum=0.0, maximum=6.0).tolist() == [0.0, 1.0, 1.0, 0.0]


def test_hardtanh_shuts_infinite_gradients_out(apply_rule):
    assert apply_rule("hardtanh", torch.tensor([2.0]), torch.tensor([torch.inf])).item() == 0.0


@pytest.mark.parametrize("slope", [0.5, 1.0, 4.0])
def test_tanh_is_the_derivative_of_a_hyperbolic_tangent(points, apply_rule, slope):
    expected = slope / torch.cosh(slope * points).square()
    torch.testing.assert_close(apply_rule("tanh", points, slope=slope), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("slope", [0.5, 1.0, 25.0])
def test_sigmoid_is_the_derivative_of_a_logistic_function(points, apply_rule, slope):
    expected = slope / (2 + 2 * torch.cosh(slope * points))
    torch.testing.assert_close(apply_rule("sigmoid", points, slope=slope), expected)


@pytest.mark.parametrize(
    ("name", "smooth"),
    [("hardtanh", functional.hardtanh), ("tanh", torch.tanh), ("sigmoid", torch.sigmoid)],
)
def test_each_is_the_true_gradient_of_its_stand_in(points, name, smooth):
    assert gradcheck_rule(name, smooth, points).exact
