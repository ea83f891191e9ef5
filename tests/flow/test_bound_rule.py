"""The gradients of a rule are checked, and its errors name the place."""

import pytest
import torch
from torch import nn

import gradpolicy as gp


def multiplied_wrongly(grad, inputs, output):
    return grad @ torch.ones(9, 9)


class Rounded(nn.Module):
    def forward(self, x):
        return torch.round(x)


@pytest.mark.parametrize(
    ("where", "place"),
    [
        ({"ops": "round"}, "operation 'round' in module '1'"),
        ({"modules": "1"}, "input of module '1'"),
        ({"params": "0.weight"}, "parameter '0.weight'"),
    ],
)
def test_the_error_of_a_rule_names_policy_rule_module_and_shapes(where, place):
    model = nn.Sequential(nn.Linear(4, 4), Rounded())
    policies = {"odd": gp.UseRule(multiplied_wrongly, **where)}
    if "ops" not in where:
        policies["through"] = gp.StraightThrough()
    with pytest.raises(gp.PolicyError) as caught, gp.install(model, policies):
        model(torch.ones(3, 4)).sum().backward()
    message = str(caught.value)
    assert message.startswith(f"policy 'odd': rule 'multiplied_wrongly' at {place}: failed")
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in message
    assert ("(4, 4)" if "params" in where else "(3, 4)") in message
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert len(message.splitlines()) == 1


def test_a_rule_that_refuses_its_inputs_is_named():
    x = torch.ones(3, requires_grad=True)
    with gp.gradient_override({"round": "lsq"}):
        y = torch.round(x)
    with pytest.raises(gp.PolicyError, match=r"rule 'lsq' at operation 'round': failed .*expects the inputs"):
        y.sum().backward()


def test_a_gradient_in_the_outputs_shape_is_summed_for_what_was_broadcast_only():
    def as_it_comes(grad, inputs, output):
        return grad, grad

    row, column = torch.ones(1, 3, requires_grad=True), torch.ones(2, 1, requires_grad=True)
    with gp.gradient_override({"add": as_it_comes}):
        (row + column).sum().backward()
    assert row.grad.tolist() == [[2.0, 2.0, 2.0]]
    assert column.grad.tolist() == [[3.0], [3.0]]

    def widened(grad, inputs, output):
        return grad.expand(2, *grad.shape)

    x = torch.ones(3, requires_grad=True)
    with gp.gradient_override({"round": widened}):
        y = torch.round(x)
    with pytest.raises(gp.PolicyError, match=r"gradient 0 of shape \(2, 3\) for an input of shape \(3,\)"):
        y.sum().backward()


def test_a_gradient_in_the_outputs_shape_is_refused_for_what_was_not_broadcast():
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    with gp.gradient_override({"matmul": lambda grad, inputs, output: (grad, None)}):
        y = x @ weight
    with pytest.raises(gp.PolicyError, match=r"gradient 0 of shape \(2, 4\) for an input of shape \(2, 3\)"):
        y.sum().backward()


def test_an_error_names_the_module_that_goes_on_after_a_part_of_it_ran():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Rounded()

        def forward(self, x):
            return torch.floor(self.part(x))

    model = nn.Sequential(Outer())
    with gp.install(model, {"odd": gp.UseRule(multiplied_wrongly, ops="floor")}):
        y = model(torch.ones(3, 4, requires_grad=True))
        with pytest.raises(gp.PolicyError, match="operation 'floor' in module '0': failed"):
            y.sum().backward()


def test_a_gradient_filter_that_returns_none_is_an_error():
    nothing = gp.Rule("nothing", lambda grad, inputs, output: grad, gradient_filter=lambda grad: None)
    x = torch.ones(3, requires_grad=True)
    with gp.gradient_override({"tanh": nothing}):
        y = torch.tanh(x)
    with pytest.raises(gp.PolicyError, match="rule 'nothing' at operation 'tanh': returned None"):
        y.sum().backward()


def test_running_out_of_memory_is_passed_on_as_it_is():
    def hungry(grad, inputs, output):
        raise torch.OutOfMemoryError

    x = torch.ones(3, requires_grad=True)
    with gp.gradient_override({"round": hungry}):
        y = torch.round(x)
    with pytest.raises(torch.OutOfMemoryError):
        y.sum().backward()
