"""The rule that routes a gradient by a condition."""

import math

import torch

from gradpolicy import get_rule

CONDITION, ONES = torch.tensor([True, False, True]), torch.ones(3)
GRAD = torch.tensor([1.0, 2.0, math.inf])


def test_gate_routes_as_where_does():
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(3, 1, requires_grad=True)
    grad, condition = torch.randn(3, 4), torch.rand(3, 1) > 0.5
    output = torch.where(condition, a, b)
    none, *found = get_rule("gate")(grad, (condition, a, b), output)
    assert none is None
    torch.testing.assert_close(tuple(found), torch.autograd.grad(output, (a, b), grad))


def test_what_was_shut_gets_zeros_also_of_infinite_gradients():
    gradient, none = get_rule("gate")(GRAD, (ONES, CONDITION), ONES)
    assert gradient.tolist() == [1.0, 0.0, math.inf]
    assert none is None
    assert get_rule("gate")(GRAD, (CONDITION, ONES, ONES), ONES)[2].tolist() == [0.0, 2.0, 0.0]
    # Alone an input passes where the output is not zero.
    assert get_rule("gate")(GRAD, (ONES,), torch.tensor([0.0, 2.0, 0.0])).tolist() == [0.0, 2.0, 0.0]
