"""Rules that ask for the call: operations with settings, every setting in every spelling."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradpolicy as gp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def softmax_grad(grad, inputs, output, *, call):
    dim = call.arguments["dim"]
    return (output * (grad - (grad * output).sum(dim, keepdim=True))).to(inputs[0].dtype)


def clamp_grad(grad, inputs, output, *, call):
    low, high = call.arguments["min"], call.arguments["max"]
    passes = torch.ones_like(inputs[0], dtype=torch.bool)
    passes = passes if low is None else passes & (inputs[0] >= low)
    passes = passes if high is None else passes & (inputs[0] <= high)
    return (torch.where(passes, grad, 0.0), *[None] * (len(inputs) - 1))


LOW, HIGH = torch.full((4,), -0.5, dtype=torch.float64), torch.full((3, 1), 0.6, dtype=torch.float64)
CALLS = {
    "softmax": [
        lambda x: torch.softmax(x, 0),
        lambda x: torch.softmax(x, dim=-1),
        lambda x: x.softmax(1),
        lambda x: F.softmax(x, dim=0),
        lambda x: F.softmax(x, 1, dtype=torch.float64),
        lambda x: torch.softmax(input=x, dim=0, dtype=torch.float64),
        lambda x: torch.special.softmax(x, 1),
        nn.Softmax(dim=0),
    ],
    "clamp": [
        lambda x: torch.clamp(x, -0.5, 0.5),
        lambda x: x.clamp(min=0.1),
        lambda x: torch.clamp(x, max=0.2),
        lambda x: x.clip(-0.3, 0.3),
        lambda x: torch.clamp_min(x, 0.1),
        lambda x: x.clamp_max(0.2),
        lambda x: x.clone().clamp_(-0.5, 0.5),
        lambda x: torch.clamp(x, LOW, HIGH),
        lambda x: x.clamp(min=LOW),
    ],
}
RULES = {"softmax": softmax_grad, "clamp": clamp_grad}


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        pytest.param(operation, call, id=f"{operation}-{number}")
        for operation, calls in CALLS.items()
        for number, call in enumerate(calls)
    ],
)
def test_rule_with_arguments_equals_torchs_gradient(operation, call, gradient):
    seen = []

    def rule(grad, inputs, output, *, call):
        seen.append(call.operation)
        return RULES[operation](grad, inputs, output, call=call)

    weights = torch.randn_like(call(X))
    own, value = gradient(call, X, weights)
    found, again = gradient(gp.gradient_override({operation: rule})(call), X, weights)
    assert seen == [operation]
    assert torch.equal(again, value)
    torch.testing.assert_close(found, own)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("operation", CALLS)
def test_compiled_too(operation, compiled, gradient):
    call = CALLS[operation][1]
    weights = torch.randn_like(call(X))
    with gp.gradient_override({operation: RULES[operation]}):
        found = gradient(compiled(call), X, weights)
    torch.testing.assert_close(found, gradient(call, X, weights))


class Part(nn.Module):
    def forward(self, x, scale=1):
        return torch.softmax(x * scale, -1)


def test_call_of_blocks_policies_and_apply():
    seen = []

    def note(grad, inputs, output, *, call):
        seen.append(call)
        return grad

    def grid(x, levels, offset=0.5):
        return torch.round(x * levels + offset)

    x = torch.ones(2, requires_grad=True)
    with gp.gradient_override({"round": note}):
        torch.round(x, decimals=1).sum().backward()
    for where in ({"ops": "softmax"}, {"modules": "*", "at": "through"}, {"modules": "*"}):
        with gp.install(model := Part(), [gp.UseRule(note, **where)]):
            model(x, scale=2).sum().backward()
    gp.apply(note, grid, x, levels=4).sum().backward()
    rounded, operation, across, at_input, applied = seen
    assert (rounded.operation, set(rounded.arguments)) == ("round", {"input", "decimals"})
    assert not rounded.arguments["input"].requires_grad
    assert operation.arguments["dim"] == -1
    assert (across.operation, across.arguments["scale"]) == ("", 2)
    assert at_input.operation == "input of module ''"
    assert (applied.operation, applied.arguments["levels"], applied.arguments["offset"]) == ("grid", 4, 0.5)


def test_call_is_no_parameter_of_the_rule():
    @gp.rule("tests_softmax_grad")
    def registered(grad, inputs, output, *, call):
        return grad * call.arguments["dim"]

    with pytest.raises(gp.PolicyError, match="no parameter 'call'; it has none"):
        gp.get_rule("tests_softmax_grad", call=3)
    assert gp.get_rule("tests_softmax_grad").missing_parameters() == []
    ones = torch.ones(2)
    given = gp.get_rule("tests_softmax_grad")(ones, (ones,), ones, gp.Call("softmax", {"dim": 3}))
    assert torch.equal(given, 3 * ones)
    assert gp.gradcheck_rule(softmax_grad, F.softmax, (X, -1)).exact
    assert "call" in inspect.signature(registered).parameters
