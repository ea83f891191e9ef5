"""One call of an operation under a rule."""

import pytest
import torch
import torch.nn.functional as F

import gradpolicy as gp

doubled = gp.Rule("doubled", lambda grad, inputs, output: grad, gradient_filter=lambda grad: 2 * grad)


def ten_times(grad, inputs, output):
    return 10.0 * grad


@pytest.mark.parametrize(("rule", "expected"), [(doubled, 2.0), (ten_times, 10.0)])
def test_operation_that_returns_its_input(rule, expected, gradient):
    contiguous = gp.gradient_override({"contiguous": rule})(torch.Tensor.contiguous)
    found, value = gradient(lambda x: (y := 3 * x) + contiguous(y), torch.ones(2))
    assert torch.equal(found, torch.full((2,), 3.0 * (1 + expected)))
    assert torch.equal(value, torch.full((2,), 6.0))


def test_a_filter_acts_on_every_floating_point_result(gradient):
    with gp.gradient_override({"max": doubled}):
        found, _ = gradient(lambda x: torch.max(x, dim=1).values, torch.tensor([[1.0, 2.0]]))
    assert found.tolist() == [[0.0, 2.0]]


def test_rule_on_an_opaque_call(gradient):
    weights = torch.tensor([1.0, 2.0, 3.0])
    with gp.gradient_override({"softmax": "stop", F.gumbel_softmax: "identity"}):
        found, _ = gradient(lambda x: F.gumbel_softmax(x, hard=True), torch.randn(3), weights)
    assert torch.equal(found, weights)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("sub", lambda a, b: torch.sub(other=b, input=a)),
        ("linear", lambda a, b: F.linear(weight=b, input=a)),
        ("where", lambda a, b: torch.where(other=b, input=a, condition=torch.eye(2) > 0)),
        ("where", lambda a, b: a.where(other=b, condition=torch.eye(2) > 0)),
    ],
)
def test_inputs_in_order_of_parameters(name, call):
    def first_twice_second_thrice(grad, inputs, output):
        return (*[None] * (len(inputs) - 2), 2 * grad, 3 * grad)

    a, b = torch.rand(2, 2, requires_grad=True), torch.rand(2, 2, requires_grad=True)
    for form in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        with gp.gradient_override({name: first_twice_second_thrice}):
            y = form(a, b)
        to_a, to_b = torch.autograd.grad(y.sum(), (a, b))
        assert torch.equal(to_a, torch.full((2, 2), 2.0))
        assert torch.equal(to_b, torch.full((2, 2), 3.0))
