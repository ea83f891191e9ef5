"""One call of an operation under a rule."""

import pytest
import torch
import torch.nn.functional as F

import gradpolicy as gp

doubled = gp.Rule("doubled", lambda grad, inputs, output: grad, gradient_filter=lambda grad: 2 * grad)


def ten_times(grad, inputs, output):
    return 10.0 * grad


@pytest.mark.parametrize(("rule", "expected"), [(doubled, 2.0), (ten_times, 10.0)])
def test_other_paths_of_an_input_that_is_returned_as_it_is_stay_plain(rule, expected, gradient):
    def both_paths(x):
        y = 3 * x
        with gp.gradient_override({"contiguous": rule}):
            z = y.contiguous()
        return y + z

    found, value = gradient(both_paths, torch.ones(2))
    assert torch.equal(found, torch.full((2,), 3.0 * (1 + expected)))
    assert torch.equal(value, torch.full((2,), 6.0))


@pytest.mark.parametrize(("rule", "expected"), [("guided_relu", 1.0), (ten_times, 10.0), ("stop", 0.0)])
def test_a_call_in_place_by_keyword(rule, expected, gradient):
    def in_place(x):
        work = x * 1
        torch.relu_(input=work)
        return work

    with gp.gradient_override({"relu": rule}):
        found, value = gradient(in_place, torch.tensor([1.0, 2.0]))
    assert torch.equal(found, torch.full((2,), expected))
    assert torch.equal(value, torch.tensor([1.0, 2.0]))


def test_a_filter_acts_before_the_operation_s_own_gradient(gradient):
    x = torch.randn(4)
    with gp.gradient_override({"tanh": doubled}):
        found, _ = gradient(torch.tanh, x)
    torch.testing.assert_close(found, 2 * (1 - torch.tanh(x) ** 2))


def test_a_filter_acts_on_every_floating_point_result(gradient):
    with gp.gradient_override({"max": doubled}):
        found, _ = gradient(lambda x: torch.max(x, dim=1).values, torch.tensor([[1.0, 2.0]]))
    assert found.tolist() == [[0.0, 2.0]]


def test_a_call_that_hides_an_operation_may_be_an_operation_with_a_rule_itself(gradient):
    with gp.gradient_override({"softmax": "stop", F.gumbel_softmax: "identity"}):
        found, _ = gradient(
            lambda x: F.gumbel_softmax(x, hard=True), torch.randn(3), torch.tensor([1.0, 2.0, 3.0])
        )
    assert found.tolist() == [1.0, 2.0, 3.0]
