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


def _own_forward(layers):
    linear = copy.deepcopy(layers[0])
    layers[0].forward = lambda x: F.relu(linear(x))


def _new_table_of_hooks(layers):
    layers[0]._forward_hooks = {0: lambda module, args, output: F.relu(output)}


# What is done to the layers, and how many ReLUs run after it.
CHANGES = {
    "replaced": (lambda layers: layers.__setitem__(1, ByFunctions(nn.Sequential(nn.ReLU()))), 2),
    "appended": (lambda layers: layers.append(nn.ReLU()), 3),
    "hook": (lambda layers: layers[0].register_forward_hook(lambda _, args, output: F.relu(output)), 3),
    "pre-hook": (lambda layers: layers[3].register_forward_pre_hook(lambda _, args: (F.relu(args[0]),)), 3),
    "table of hooks": (_new_table_of_hooks, 3),
    "forward": (_own_forward, 3),
    "parametrisation": (
        lambda layers: nn.utils.parametrize.register_parametrization(layers[0], "weight", nn.ReLU()),
        3,
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("runs_before", [False, True])
def test_what_is_changed_after_the_installation_is_seen(kind, runs_before, layers, batch):
    change, relus = CHANGES[kind]
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


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_rules_at_a_scripted_or_traced_module_know_its_arguments(kind):
    def double(grad, inputs, output, *, call):
        assert torch.equal(call.arguments["input"], inputs[0])
        return 2.0 * grad

    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    traced = torch.jit.script(inner) if kind == "script" else torch.jit.trace(inner, torch.ones(1, 2))
    model, x = nn.Sequential(nn.Linear(2, 2), traced), torch.ones(3, 2)
    (plain,) = torch.autograd.grad(model(x).sum(), model[0].weight)
    for policy, expected in (
        (gp.Scale(3.0, modules="1", argument="input"), 3.0 * plain),
        (gp.Scale(3.0, modules="1", argument=0), 3.0 * plain),
        (gp.UseRule(double, modules="1", at="through"), 2.0 * torch.ones(2, 3) @ x),
    ):
        with gp.install(model, [policy], strict=True):
            (found,) = torch.autograd.grad(model(x).sum(), model[0].weight)
        torch.testing.assert_close(found, expected)
    assert "forward" not in traced.__dict__ or kind == "script"
