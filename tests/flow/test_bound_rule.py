"""The gradients of a rule are checked, and its errors name the place."""

import re

import pytest
import torch
from torch import nn

import gradpolicy as gp


def multiplied_wrongly(grad, inputs, output):
    return grad @ torch.ones(9, 9)


@pytest.mark.parametrize(
    ("where", "place"),
    [
        ({"ops": "round"}, "operation 'round' in module '1'"),
        ({"modules": "1"}, "input of module '1'"),
        ({"params": "0.weight"}, "parameter '0.weight'"),
    ],
)
def test_error_names_policy_rule_module_and_shapes(where, place, as_module):
    model = nn.Sequential(nn.Linear(4, 4), as_module(torch.round))
    policies = {"odd": gp.UseRule(multiplied_wrongly, **where)}
    if "ops" not in where:
        policies["through"] = gp.StraightThrough()
    with pytest.raises(gp.PolicyError) as caught, gp.install(model, policies):
        model(torch.ones(3, 4)).sum().backward()
    message = str(caught.value)
    assert message.startswith(f"policy 'odd': rule 'multiplied_wrongly' at {place}: failed")
    assert re.search(": RuntimeError: (mm: )?mat1 and mat2 shapes cannot be multiplied", message)
    assert ("(4, 4)" if "params" in where else "(3, 4)") in message
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert len(message.splitlines()) == 1


WRONG = gp.Rule("nothing", lambda grad, inputs, output: grad, gradient_filter=lambda grad: None)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda g, i, o: (g, g), r"returned 2 gradients \(\(3,\), \(3,\)\) for 1 inputs"),
        (lambda g, i, o: g[:2], r"shape \(2,\) for an input of shape \(3,\)"),
        (lambda g, i, o: g.expand(2, 3), r"gradient 0 of shape \(2, 3\) for an input of shape \(3,\)"),
        (lambda g, i, o: 1.0, "returned float"),
        (lambda g, i, o: g.long(), "int64"),
        (lambda g, i, o: g * 1j, "complex"),
        ("lsq", "failed .*expects the inputs"),
        (WRONG, "returned None"),
    ],
)
def test_wrong_results_of_rules(rule, message):
    rule = gp.get_rule(rule)
    with gp.gradient_override({"tanh": rule}):
        y = torch.tanh(torch.randn(3, requires_grad=True))
    with pytest.raises(gp.PolicyError, match=f"rule '{rule.name}' at operation 'tanh'.*{message}"):
        y.sum().backward()


def test_sums_over_broadcast_dimensions_only(gradients):
    row, column = torch.ones(1, 3, requires_grad=True), torch.ones(2, 1, requires_grad=True)
    with gp.gradient_override({"add": lambda grad, inputs, output: (grad, grad)}):
        found = gradients(torch.add, row, column, weights=torch.ones(2, 3))
    assert [one.tolist() for one in found] == [[[2.0, 2.0, 2.0]], [[3.0], [3.0]]]
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    with gp.gradient_override({"matmul": lambda grad, inputs, output: (grad, None)}):
        y = x @ weight
    with pytest.raises(gp.PolicyError, match=r"gradient 0 of shape \(2, 4\) for an input of shape \(2, 3\)"):
        y.sum().backward()


def test_out_of_memory_passes():
    def hungry(grad, inputs, output):
        raise torch.OutOfMemoryError

    x = torch.ones(3, requires_grad=True)
    with gp.gradient_override({"round": hungry}):
        y = torch.round(x)
    with pytest.raises(torch.OutOfMemoryError):
        y.sum().backward()


@pytest.mark.parametrize(
    "spike", [lambda v: (v > 0).float(), lambda v: torch.heaviside(v, torch.zeros(())), lambda v: v.round()]
)
def test_writing_to_what_a_rule_reads_names_the_policy(spike, as_module):
    def fire_and_reset(x):
        v = 2 * x
        spikes = spike(v)
        v[spikes > 0] = 0
        return spikes + v

    policy = gp.StraightThrough("arctan", ops=["gt", "heaviside", "round"])
    with gp.install(model := as_module(fire_and_reset), {"spikes": policy}):
        y = model(torch.tensor([-1.0, 1.0], requires_grad=True))
    message = (
        r"^policy 'spikes': rule 'arctan' at operation '\w+' in the model: reads a tensor .* in place .*$"
    )
    with pytest.raises(gp.PolicyError, match=message):
        y.sum().backward()
