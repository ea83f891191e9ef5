"""Rules for ReLU and its smooth relatives."""

import math

import pytest
import torch

import gradpolicy as gp

X = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0])
GRAD = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])


def own_gradient(function, x, grad):
    point = x.clone().requires_grad_()
    return torch.autograd.grad(function(point), point, grad)[0]


@pytest.mark.parametrize(
    ("name", "x", "grad", "expected"),
    [
        ("guided_relu", X, GRAD, [0.0, 0.0, 0.0, 0.0, 1.0]),
        ("guided_relu", -torch.ones(2), torch.tensor([math.inf, math.nan]), [0.0, 0.0]),
        ("deconv_relu", X, GRAD, [1.0, 0.0, 1.0, 0.0, 1.0]),
        # Plain where anything passes, and around the ReLU where a sample gets nothing.
        ("redirected_relu", X[None], GRAD[None], own_gradient(torch.relu, X, GRAD)[None].tolist()),
        (
            "redirected_relu",
            torch.tensor([[-1.0, -1.0], [-1.0, 1.0]]),
            torch.tensor([[-2.0, 3.0], [-2.0, 3.0]]),
            [[-2.0, 0.0], [0.0, 3.0]],
        ),
        # Each entry of a vector is a sample.
        (
            "redirected_relu",
            torch.tensor([-1.0, -1.0, 1.0]),
            torch.tensor([-2.0, 2.0, 2.0]),
            [-2.0, 0.0, 2.0],
        ),
    ],
)
def test_a_rule_of_relu_follows_its_formula(name, x, grad, expected):
    assert gp.get_rule(name)(grad, (x,), x.relu()).tolist() == expected
    assert own_gradient(gp.gradient_override({"relu": name})(torch.relu), x, grad).tolist() == expected
