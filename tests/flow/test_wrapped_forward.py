"""Short ways through ``nn.ReLU`` and ``nn.Sequential`` give what the long ones give."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradpolicy as gp


@pytest.fixture
def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


class InAForwardOfItsOwn(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


class OneByOne(InAForwardOfItsOwn):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class ByFunctions(InAForwardOfItsOwn):
    def forward(self, x):
        for layer in self.layers:
            x = F.relu(x) if isinstance(layer, nn.ReLU) else layer(x)
        return x


class Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(min=0) * (ctx.saved_tensors[0] > 0)


class ByHand(InAForwardOfItsOwn):
    def forward(self, x):
        for layer in self.layers:
            x = Rule.apply(x) if isinstance(layer, nn.ReLU) else layer(x)
        return x


@pytest.mark.parametrize("written", [InAForwardOfItsOwn, OneByOne, ByFunctions])
@pytest.mark.parametrize("inplace", [False, True])
def test_every_way_to_write_a_network_is_guided_alike(
    written, inplace, layers, batch, parameter_gradients, same
):
    wanted = parameter_gradients(ByHand(layers), batch)
    for relu in (layers[1], layers[3]):
        relu.inplace = inplace
    model = written(layers)
    with gp.install(model, [gp.Guided()]) as installed:
        assert same(parameter_gradients(model, batch), wanted)
    assert installed.report().rows[0].matched == {"relu": 2}


def test_gradients_at_the_relus_own_output_are_the_plain_ones(layers, batch):
    model = OneByOne(layers)
    with gp.install(model, [gp.Guided()]):
        hidden = layers[1](layers[0](batch))
        result = layers[4](layers[3](layers[2](hidden)))
        (at_output,) = torch.autograd.grad(result.sum(), hidden)
    at_input = torch.autograd.grad(layers[4](Rule.apply(layers[2](hidden))).sum(), hidden)[0]
    torch.testing.assert_close(at_output, at_input)
    assert (at_output < 0).any()


def _replace(layers):
    layers[1] = ByFunctions(nn.Sequential(nn.ReLU()))


def _append(layers):
    layers.append(nn.ReLU())


def _hook(layers):
    layers[0].register_forward_hook(lambda module, args, output: F.relu(output))


def _hook_on_a_relu(layers):
    layers[3].register_forward_pre_hook(lambda module, args: (F.relu(args[0]),))


def _new_table_of_hooks(layers):
    layers[0]._forward_hooks = {0: lambda module, args, output: F.relu(output)}


def _own_forward(layers):
    linear = copy.deepcopy(layers[0])
    layers[0].forward = lambda x: F.relu(linear(x))


def _parametrisation(layers):
    nn.utils.parametrize.register_parametrization(layers[0], "weight", nn.ReLU())


@pytest.mark.parametrize(
    ("change", "relus"),
    [
        (_replace, 2),
        (_append, 3),
        (_hook, 3),
        (_hook_on_a_relu, 3),
        (_new_table_of_hooks, 3),
        (_own_forward, 3),
        (_parametrisation, 3),
    ],
)
@pytest.mark.parametrize("runs_before", [False, True])
def test_what_is_changed_after_the_installation_is_seen(change, relus, runs_before, layers, batch):
    with gp.install(layers, [gp.Guided()]) as installed:
        if runs_before:
            layers(batch)
        before = installed.report().rows[0].operations_matched
        change(layers)
        layers(batch)
        assert installed.report().rows[0].operations_matched - before == relus


def test_hooks_on_a_relu_run(layers, batch):
    met = []
    with gp.install(layers, [gp.Guided()]):
        layers(batch).sum().backward()
        layers[1].register_forward_hook(lambda *_: met.append("forward"))
        layers[3].register_full_backward_hook(lambda *_: met.append("backward"))
        layers(batch).sum().backward()
    assert met == ["forward", "backward"]


def test_a_relu_that_another_tool_wrapped_is_let_through_after_removal(
    layers, batch, parameter_gradients, same
):
    plain = parameter_gradients(layers, batch)
    installed = gp.install(layers, [gp.Guided()])
    ours = layers[1].forward
    layers[1].forward = lambda x: ours(x)
    with pytest.warns(UserWarning, match="was replaced"):
        installed.remove()
    assert same(parameter_gradients(layers, batch), plain)


def test_a_relu_without_a_graph_counts_as_met_and_not_as_matched(layers, batch):
    with gp.install(layers, [gp.Guided()]) as installed:
        with torch.no_grad():
            layers(batch)
        (row,) = installed.report().rows
    assert "relu" in row.operations_met
    assert row.matched == {}


def test_an_outer_block_does_not_reach_the_relus_of_a_policy(layers, batch, parameter_gradients, same):
    wanted = parameter_gradients(ByHand(layers), batch)
    model = InAForwardOfItsOwn(layers)
    with gp.install(model, [gp.Guided()]), gp.gradient_override({"relu": "stop"}):
        found = parameter_gradients(model, batch)
    assert same(found, wanted)


def test_a_copy_of_a_sequence_that_ran_runs_its_own_weights(layers, batch, parameter_gradients, same):
    model = InAForwardOfItsOwn(layers)
    with gp.install(model, [gp.Guided()]):
        model(batch)
        other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
        for parameter in layers.parameters():
            parameter.mul_(0.5)
    assert same(parameter_gradients(other, batch), parameter_gradients(ByHand(layers), batch))


class Traced(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.before, inner = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.inner = torch.jit.script(inner) if kind == "script" else torch.jit.trace(inner, torch.ones(1, 2))

    def forward(self, x):
        return self.inner(self.before(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("kind", ["script", "trace"])
@pytest.mark.parametrize(
    ("policy", "factor"),
    [
        (gp.Scale(3.0, modules="inner"), 3.0),
        (gp.Scale(3.0, modules="inner", argument="input"), 3.0),
        (gp.Scale(3.0, modules="inner", argument=0), 3.0),
        (gp.Scale(3.0, modules="inner", at="output"), 3.0),
        (gp.Stop("zero", modules="inner"), 0.0),
    ],
)
def test_policies_round_a_scripted_or_traced_module_act(kind, policy, factor):
    model = Traced(kind)
    model(torch.ones(3, 2)).sum().backward()
    plain = model.before.weight.grad.clone()
    model.zero_grad()
    with gp.install(model, [policy], strict=True):
        model(torch.ones(3, 2)).sum().backward()
    torch.testing.assert_close(model.before.weight.grad, factor * plain)
    assert "forward" not in model.inner.__dict__ or kind == "script"


@pytest.mark.parametrize("kind", ["script", "trace"])
def test_a_rule_through_a_scripted_or_traced_module_knows_its_arguments(kind):
    def double(grad, inputs, output, *, call):
        assert torch.equal(call.arguments["input"], inputs[0])
        return 2.0 * grad

    model, x = Traced(kind), torch.ones(3, 2)
    with gp.install(model, [gp.UseRule(double, modules="inner", at="through")], strict=True):
        model(x).sum().backward()
    torch.testing.assert_close(model.before.weight.grad, 2.0 * torch.ones(2, 3) @ x)
