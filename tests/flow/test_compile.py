"""torch.compile: the same numbers, and never those of another time."""

import copy
import subprocess
import sys

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


@pytest.fixture
def agree(gradient):
    """A check that compiled code has the result and the gradient of eager mode."""

    def check(compiled, function, x):
        weights = torch.randn(function(x).shape)
        torch.testing.assert_close(gradient(compiled, x, weights), gradient(function, x, weights))

    return check


@pytest.mark.supports("flow", loop="plain", compiled=True)
@pytest.mark.slow
@pytest.mark.parametrize("backend", SLOW_BACKENDS)
@pytest.mark.parametrize("compiled_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_equals_eager_at_every_step(backend, compiled_first, batch, parameter_gradients, same):
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


def test_schedules_and_measured_norms_do_not_recompile(batch, parameter_gradients):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with gp.install(model, [gp.Scale(lambda step: 1.0 + step, modules="1")]) as installed:
        parameter_gradients(model, batch, call=compiled)
        counter = torch._dynamo.utils.counters["stats"]
        graphs = counter["unique_graphs"]
        for step in range(1, 5):
            installed.update(step=step)
            installed.measure_norms(step % 2 == 0)
            parameter_gradients(model, batch, call=compiled)
        assert counter["unique_graphs"] == graphs


# What runs in eager mode calls what is compiled again.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo (detected a call|does not know how to trace)")
def test_installing_within_compiled_code(batch, agree):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def run(x):
        with gp.install(model, [gp.Deconv()]):
            return model(x)

    with pytest.raises(Exception, match="cannot be installed within compiled code"):
        torch.compile(run, backend="eager", fullgraph=True)(batch)
    torch._dynamo.reset()
    agree(torch.compile(run, backend="eager"), run, batch)


def function_of_many(x):
    return torch.round(x) + F.relu(-x) + torch.sign(x)


OVERRIDES = {"round": "identity", "relu": "guided_relu", "sign": torch.tanh}


def thrice(grad, inputs, output):
    return 3.0 * grad


@gp.gradient_override(OVERRIDES)
def decorated(x):
    return function_of_many(x)


def part(x):
    return decorated(x) + function_of_many(x)


@gp.gradient_override({"relu": thrice})
def inner(x):
    return function_of_many(x)


@gp.gradient_override({"round": "identity", "relu": "stop"})
def nested(x):
    return inner(x) + function_of_many(x)


def any_forward(x):
    return gp.apply("tanh", torch.round, x)


@pytest.mark.parametrize("backend", SLOW_BACKENDS)
@pytest.mark.parametrize(
    "function",
    [
        any_forward,
        *(pytest.param(function, marks=pytest.mark.slow) for function in (decorated, part, nested)),
    ],
)
def test_block_within_compiled_code(function, backend, batch, agree):
    for _ in range(2):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for _ in range(2):
            agree(compiled, function, batch)
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.slow
def test_block_around_compiled_code_compiles_once(batch, agree):
    compiled = torch.compile(function_of_many, backend="eager", fullgraph=True)
    graphs = []
    for factor in (2.0, 3.0, 2.0):
        for _ in range(2):
            with gp.gradient_override({"round": gp.get_rule("scale", factor=factor), "sign": torch.tanh}):
                agree(compiled, function_of_many, batch)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] - graphs[0] == 1


@gp.gradient_override({"round": "identity"})
def broken(x):
    first = torch.round(x)
    torch._dynamo.graph_break()
    return first + torch.round(2 * x)


MADE_BEFORE = gp.gradient_override({"round": "identity"})


def entered_and_broken(x):
    with MADE_BEFORE:
        first = torch.round(x)
        torch._dynamo.graph_break()
        return first + torch.round(2 * x)


@pytest.mark.parametrize("function", [broken, entered_and_broken])
def test_block_with_a_graph_break(function, batch, agree):
    def breaks(x):
        return function(x) + torch.round(3 * x)

    agree(torch.compile(breaks, backend="eager"), breaks, batch)


def test_block_made_within_compiled_code(batch, agree):
    def made_within(x):
        with gp.gradient_override({"round": gp.get_rule("scale", factor=2.0)}):
            return torch.round(x)

    with pytest.raises(Exception, match="cannot be made within compiled code"):
        torch.compile(made_within, backend="eager", fullgraph=True)(batch)
    torch._dynamo.reset()
    agree(torch.compile(made_within, backend="eager"), made_within, batch)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "transform", [torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f)), torch.vmap]
)
@pytest.mark.parametrize(
    "rule", [gp.Rule("own", lambda own, i, o: own, own=True), "guided_relu", "redirected_relu"]
)
def test_torch_func_in_compiled_code(rule, transform, batch):
    @gp.gradient_override({"relu": rule})
    def loss(x):
        return (F.relu(x) * torch.sin(x)).sum()

    with pytest.raises(Exception, match="cannot be compiled under a transform"):
        torch.compile(transform(loss), backend="eager", fullgraph=True)(batch)
    in_eager_mode = torch.compiler.disable(transform(loss))
    compiled = torch.compile(lambda x: in_eager_mode(2 * x) + 1, backend="eager")
    torch.testing.assert_close(compiled(batch), transform(loss)(2 * batch) + 1)


@pytest.mark.slow
def test_a_model_of_many_modules_within_each_other_compiles(batch, parameter_gradients, same):
    model = nn.Sequential(nn.Linear(4, 4))
    for _ in range(10):
        model = nn.Sequential(model, nn.ReLU())
    with gp.install(model, [gp.Guided()]):
        expected = parameter_gradients(model, batch)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert same(parameter_gradients(model, batch, call=compiled), expected)
    assert any(gradient.any() for gradient in expected.values())


UNKNOWN = """
import warnings
import torch
torch.__version__ = "2.99.0"
import gradpolicy as gp
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
x = torch.tensor([[1.0, -2.0]], requires_grad=True)
with warnings.catch_warnings(record=True) as found, gp.install(model, [gp.StraightThrough(ops=["relu"])]):
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    (gradient,) = torch.autograd.grad(torch.compile(model, backend="eager")(x).sum(), x)
assert "the compiler of torch 2.99.0 is not known" in str(found[0].message)
torch.testing.assert_close(gradient, model[0].weight.sum(0)[None])
torch.testing.assert_close(gradient, plain)
"""


@pytest.mark.mostly_slow
def test_unknown_compiler_leaves_policies_to_eager_mode():
    subprocess.run([sys.executable, "-c", UNKNOWN], check=True, timeout=300)
