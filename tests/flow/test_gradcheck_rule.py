"""gradcheck_rule compares a rule with the true gradient of any function that apply takes."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gradpolicy import PolicyError, get_rule, gradcheck_rule

X = torch.tensor([[-1.5, 0.4], [0.9, 2.0]])
V, W = torch.tensor([0.3, -1.2, 0.9]), torch.tensor([2.0, 0.5, -0.7])


def own(function):
    """The true gradient as a rule, by autograd: an independent reference for the differences."""

    def true_gradient(grad, inputs, output):
        with torch.enable_grad():
            points = [tensor.detach().requires_grad_() for tensor in inputs]
            return torch.autograd.grad(function(*points), points, grad)

    return true_gradient


@pytest.mark.parametrize(
    ("rule", "forward", "figures", "text"),
    [
        (
            get_rule("scale", factor=1.7),
            torch.clone,
            {"length_ratio": 1.7, "cosine": 1, "relative_deviation": 0.7},
            "1.70 x as long, cosine 1.00",
        ),
        ("reverse", torch.clone, {"cosine": -1, "relative_deviation": 2}, "cosine -1.00"),
        ("identity", torch.round, {"length_ratio": math.inf, "cosine": math.nan}, "left out at a kink"),
        (lambda g, i, o: g * math.nan, torch.clone, {"deviation": math.nan}, "largest deviation nan"),
    ],
)
def test_departures(rule, forward, figures, text):
    check = gradcheck_rule(rule, forward, X)
    assert not check.exact
    assert {name: getattr(check, name) for name in figures} == pytest.approx(figures, nan_ok=True)
    assert text in str(check)


def test_leaves_out_kinks_and_jumps():
    check = gradcheck_rule(own(F.hardtanh), F.hardtanh, torch.tensor([1.0, 0.3, -2.0]))
    assert check.exact
    assert check.left_out == 1
    assert gradcheck_rule("stop", torch.round, torch.tensor([0.5, 0.2])).left_out == 1
    assert "left out at a kink or jump: 1" in str(check)


def of_rows(grad, inputs, output):
    return torch.zeros_like(inputs[0]).index_add(0, inputs[1], grad), None


def product(grad, inputs, output):
    return grad * inputs[1], grad * inputs[0]


def of_several_results(grads, inputs, outputs):
    return grads[0] * torch.cos(inputs[0]) + grads[1] * outputs[1]


def fast_sine(x):
    return torch.sin(50 * x)


@pytest.mark.parametrize(
    ("rule", "forward", "inputs"),
    [
        (own(F.gelu), F.gelu, X),
        (own(torch.matmul), torch.matmul, (torch.randn(2, 3), torch.randn(3, 4))),
        # Strong curvature is no kink.
        (own(fast_sine), fast_sine, X),
        # Integer inputs are given as they are, and None counts as zeros.
        (of_rows, lambda x, rows: x[rows], (X, torch.tensor([1, 1, 0]))),
        (lambda grad, inputs, output: None, torch.round, X),
        # Arrays, other arguments, containers, several results.
        (lambda g, i, o: 6 * g * i[0] ** 2, lambda x, scale, mode: scale * x**3, (V.numpy(), 2.0, "cubed")),
        ("torch.exp", np.exp, V.double().numpy()),
        (product, np.multiply, (V, W)),
        (product, lambda pair: pair["a"] * pair["b"][0], ({"a": V, "b": [W]},)),
        (of_several_results, lambda x: (torch.sin(x), torch.exp(x), x.argmax()), V),
    ],
)
def test_true_gradients_are_exact(rule, forward, inputs):
    check = gradcheck_rule(rule, forward, inputs)
    assert check.exact
    assert check.deviation < (1e-5 if forward is fast_sine else 1e-8)
    assert "is exact" in str(check)
    # X has one point at a jump.
    assert check.left_out == (forward is torch.round)


def test_wrong_gradient_of_one_of_two_inputs():
    assert gradcheck_rule(product, lambda a, b: a.copy() * b, (V, W), numpy=True).exact
    assert not gradcheck_rule(lambda g, i, o: (g * i[1], g), torch.mul, (V, W)).exact


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("forward", [lambda x: (torch.eye(3) @ x) ** 3, lambda x: (x.double() ** 3).float()])
def test_tolerance_follows_the_precision_of_the_forward(forward, scale):
    def checked(factor, **settings):
        return gradcheck_rule(lambda g, i, o: factor * g * i[0] ** 2, forward, V * scale, **settings)

    check, off = checked(3), checked(3.3)
    assert check.exact
    assert check.left_out == 0
    assert check.tolerance == 0.01
    assert not off.exact
    assert off.length_ratio == pytest.approx(1.1, abs=0.01)
    assert not checked(3, tolerance=1e-9).exact


@pytest.mark.parametrize(
    ("rule", "forward", "inputs", "message"),
    [
        (
            lambda g, i, o: (g, g),
            torch.clone,
            X,
            r"'<lambda>' at forward 'clone': returned 2 gradients \(.*\) for 1 inputs",
        ),
        ("identity", torch.abs, torch.zeros(2), "every entry is at a kink"),
        ("bernoulli", torch.bernoulli, torch.full((20,), 0.5), "the forward is random"),
        ("identity", 3, torch.ones(1), "gradcheck_rule: the forward must be a function, got 3"),
        ("identity", torch.clone, torch.arange(3), "'identity': there is no floating-point input to check"),
    ],
)
def test_refusals(rule, forward, inputs, message):
    with pytest.raises(PolicyError, match=message):
        gradcheck_rule(rule, forward, inputs)
