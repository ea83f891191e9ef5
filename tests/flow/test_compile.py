"""torch.compile: the same numbers, and never those of another time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradpolicy as gp

SLOW_BACKENDS = [
    "eager",
    pytest.param("aot_eager", marks=pytest.mark.slow),
    pytest.param("inductor", marks=pytest.mark.slow),
]


class Small(nn.Module):
    """One operation and one boundary of each kind."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.stem(x)
        work = torch.round(2 * hidden)
        F.relu(work, inplace=True)
        return self.head(work + (hidden > 0.5) * 1.0)


POLICIES = {
    "guide": gp.Guided(modules=["*", "!head"]),
    "rounding": gp.StraightThrough("tanh"),
    "compared": gp.UseRule("fast_sigmoid", ops="gt"),
    "turn": gp.Reverse(lambda step: 1.0 + step, modules="stem.1"),
    "bound": gp.Clip(norm=0.5, per_sample=True, modules="head"),
    "cut": gp.Stop("zero", modules="stem", at="output", when=gp.When(start=2, stop=3)),
}


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", SLOW_BACKENDS)
@pytest.mark.parametrize("compiled_first", [False, True])
def test_compiled_and_eager_agree_at_every_step(backend, compiled_first, batch, parameter_gradients, same):
    model = Small()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def agree():
        return same(parameter_gradients(model, batch, call=compiled), parameter_gradients(twin, batch), 1e-5)

    if compiled_first:
        assert agree()
    with gp.install(model, POLICIES) as one, gp.install(twin, POLICIES) as other:
        assert agree()
        for step in (1, 2, 3):
            for installed in (one, other):
                installed.update(step=step)
            assert agree(), step
        one.set_loss_scale(8.0)
        other.set_loss_scale(8.0)
        assert agree()
        row = one.report().rows[0]
        assert row.compiled
        assert row.operations_matched
    assert agree()


def test_a_schedule_does_not_recompile(batch, parameter_gradients):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with gp.install(model, [gp.Scale(lambda step: 1.0 + step, modules="1")]) as installed:
        parameter_gradients(model, batch, call=compiled)
        counter = torch._dynamo.utils.counters["stats"]
        graphs = counter["unique_graphs"]
        for step in range(1, 5):
            installed.update(step=step)
            parameter_gradients(model, batch, call=compiled)
        assert counter["unique_graphs"] == graphs


def function_of_many(x):
    return torch.round(x) + F.relu(-x) + torch.sign(x)


OVERRIDES = {"round": "identity", "relu": "guided_relu", "sign": torch.tanh}


def test_compiled_code_within_a_block_and_again_without_it(batch, gradient):
    compiled = torch.compile(function_of_many, backend="eager", fullgraph=True)
    weights = torch.randn_like(batch)
    plain, _ = gradient(function_of_many, batch, weights)
    for _ in range(2):
        with gp.gradient_override(OVERRIDES):
            expected, _ = gradient(function_of_many, batch, weights)
            found, _ = gradient(compiled, batch, weights)
        torch.testing.assert_close(found, expected)
        found, _ = gradient(compiled, batch, weights)
        torch.testing.assert_close(found, plain)


def test_a_block_made_within_compiled_code_holds_or_is_refused(batch, gradient):
    def function(x):
        with gp.gradient_override(OVERRIDES):
            return function_of_many(x)

    expected, _ = gradient(function, batch)
    found, _ = gradient(torch.compile(function, backend="eager"), batch)
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="cannot be made within compiled code"):
        torch.compile(function, backend="eager", fullgraph=True)(batch)


def test_any_forward_within_compiled_code(batch, gradient):
    def function(x):
        return gp.apply("tanh", torch.round, x)

    expected, _ = gradient(function, batch)
    found, _ = gradient(torch.compile(function, backend="eager", fullgraph=True), batch)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_inductor_with_changing_shapes(parameter_gradients, same):
    model = Small()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, dynamic=True)
    with gp.install(model, POLICIES), gp.install(twin, POLICIES):
        for rows in (3, 5, 8):
            x = torch.randn(rows, 4)
            assert same(parameter_gradients(model, x, call=compiled), parameter_gradients(twin, x), 1e-5)
