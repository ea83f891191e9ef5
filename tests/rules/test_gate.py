import math

import pytest
import torch

from gradpolicy import PolicyError, get_rule

CONDITION = torch.tensor([True, False, True])
GRAD = torch.tensor([1.0, 2.0, math.inf])


def test_gate_routes_as_where_does():
    a, b, grad = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    condition = torch.rand(3, 1) > 0.5
    a.requires_grad_()
    b.requires_grad_()
    output = torch.where(condition, a, b)
    reference = torch.autograd.grad(output, (a, b), grad)
    none, to_a, to_b = get_rule("gate")(grad, (condition, a, b), output)
    assert none is None
    assert torch.equal(to_a, reference[0])
    assert torch.equal(to_b, reference[1])


def test_what_was_shut_gets_zeros_also_of_infinite_gradients():
    x = torch.ones(3)
    gradient, none = get_rule("gate")(GRAD, (x, CONDITION), x)
    assert gradient.tolist() == [1.0, 0.0, math.inf]
    assert none is None
    _, _, other = get_rule("gate")(GRAD, (CONDITION, x, x), x)
    assert other.tolist() == [0.0, 2.0, 0.0]


def test_an_input_that_was_broadcast_gets_the_sum():
    _, scalar, _ = get_rule("gate")(
        torch.ones(3), (CONDITION, torch.tensor(1.0), torch.ones(3)), torch.ones(3)
    )
    assert scalar.item() == 2.0


def test_alone_an_input_passes_where_the_output_is_not_zero():
    x = torch.tensor([0.4, 1.6])
    assert get_rule("gate")(torch.ones(2), (x,), torch.tensor([0.0, 2.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.ones(3), torch.ones(3)),
        (CONDITION, CONDITION, torch.ones(3)),
        (CONDITION, torch.ones(3), torch.ones(3), torch.ones(3)),
    ],
)
def test_gate_says_what_it_needs(inputs):
    with pytest.raises(PolicyError, match=r"'gate': expects one boolean condition.*got \("):
        get_rule("gate")(torch.ones(3), inputs, torch.ones(3))
