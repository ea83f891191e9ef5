"""The derivative of another function at the same inputs."""

import pickle

import pytest
import torch

import gradpolicy as gp
from gradpolicy.rules.derivative import Derivative

X, Y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])


def product(x, y=None):
    return x**2 if y is None else x * y


def test_it_is_the_derivative_in_as_many_inputs_as_the_function_takes():
    grads = Derivative(product, "product")(torch.ones(2), (X, Y), X)
    assert torch.equal(grads[0], Y)
    assert torch.equal(grads[1], X)
    (alone,) = Derivative(product, "product")(torch.ones(2), (X,), X)
    assert torch.equal(alone, 2 * X)
    first, second, third = Derivative(product, "product")(torch.ones(2), (X, Y, Y), X)
    assert torch.equal(first, Y)
    assert torch.equal(second, X)
    assert third is None


def test_what_does_not_fit_is_refused():
    with pytest.raises(gp.PolicyError, match=r"total gives shape \(\) at the inputs of .* gives \(2,\)"):
        Derivative(torch.sum, "total")(torch.ones(2), (X,), X)
    with pytest.raises(gp.PolicyError, match=r"nothing takes none of the inputs \[\(2,\), \(2,\)\]"):
        Derivative(lambda: None, "nothing")(torch.ones(2), (X, Y), X)


def test_it_can_be_pickled():
    grad = pickle.loads(pickle.dumps(Derivative(product, "product")))(torch.ones(2), (X,), X)
    assert torch.equal(grad[0], 2 * X)
