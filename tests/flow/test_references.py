"""Guided and deconv, however a network is written, against captum, zennit and an autograd.Function."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradpolicy as gp


@pytest.fixture
def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("policy", "of_captum", "of_zennit"),
    [(gp.Guided, "GuidedBackprop", "GuidedBackprop"), (gp.Deconv, "Deconvolution", "DeconvNet")],
)
def test_agrees_with_captum_and_zennit(gradient, zennit, policy, of_captum, of_zennit):
    attr = pytest.importorskip("captum.attr")
    from zennit import composites

    convolutions = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()
    network, images = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64, 3)), torch.randn(3, 1, 6, 6)
    with gp.install(network, [policy()]):
        ours, _ = gradient(lambda x: network(x)[:, 1], images)
    with getattr(composites, of_zennit)().context(network):
        by_zennit, _ = gradient(lambda x: network(x)[:, 1], images)
    by_captum = getattr(attr, of_captum)(network).attribute(images.clone().requires_grad_(), target=1)
    torch.testing.assert_close(ours, by_zennit, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours, by_captum, rtol=1e-6, atol=1e-6)


class GuidedByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(min=0) * (ctx.saved_tensors[0] > 0)


class Written(nn.Module):
    """Layers one by one, with a function in place of each ReLU, or the module itself."""

    def __init__(self, layers, relu=None):
        super().__init__()
        self.layers, self.relu = layers, relu

    def forward(self, x):
        for layer in self.layers:
            x = self.relu(x) if self.relu and isinstance(layer, nn.ReLU) else layer(x)
        return x


@pytest.mark.parametrize("write", [nn.Sequential, Written, lambda layers: Written(layers, F.relu)])
@pytest.mark.parametrize("inplace", [False, True])
def test_guided_in_every_way_to_write_a_network(write, inplace, layers, batch, parameter_gradients):
    wanted = parameter_gradients(Written(layers, GuidedByHand.apply), batch)
    layers[1].inplace = layers[3].inplace = inplace
    with gp.install(model := write(layers), [gp.Guided()]) as installed:
        found = parameter_gradients(model, batch)
        # A rule of an outer block does not reach them.
        with gp.gradient_override({"relu": "stop"}):
            again = parameter_gradients(model, batch)
    for gradients in (found, again):
        torch.testing.assert_close([*gradients.values()], [*wanted.values()], rtol=1e-6, atol=1e-6)
    assert installed.report().rows[0].matched == {"relu": 4}


def _own_forward(layers):
    linear = copy.deepcopy(layers[0])
    layers[0].forward = lambda x: F.relu(linear(x))


# What is done to the layers, and how many ReLUs run after it.
CHANGES = {
    "replaced": (lambda layers: layers.__setitem__(1, nn.Sequential(nn.ReLU())), 2),
    "appended": (lambda layers: layers.append(nn.ReLU()), 3),
    "hook": (lambda layers: layers[0].register_forward_hook(lambda _, args, output: F.relu(output)), 3),
    "pre-hook": (lambda layers: layers[3].register_forward_pre_hook(lambda _, args: (F.relu(args[0]),)), 3),
    "forward": (_own_forward, 3),
    "parametrisation": (
        lambda layers: nn.utils.parametrize.register_parametrization(layers[0], "weight", nn.ReLU()),
        3,
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changes_after_installation_are_seen(kind, layers, batch):
    change, relus = CHANGES[kind]
    with gp.install(layers, [gp.Guided()]) as installed:
        layers(batch)
        before = installed.report().rows[0].operations_matched
        change(layers)
        layers(batch)
        assert installed.report().rows[0].operations_matched - before == relus


def test_relu_wrapped_by_another_tool(layers, batch, parameter_gradients, same):
    layers[3].forward = lambda x: F.relu(x) + 1
    plain, result = parameter_gradients(layers, batch), layers(batch)
    installed = gp.install(layers, [gp.Guided()])
    assert torch.equal(layers(batch), result)
    ours = layers[1].forward
    layers[1].forward = lambda x: ours(x)
    with pytest.warns(UserWarning, match="was replaced"):
        installed.remove()
    assert same(parameter_gradients(layers, batch), plain)
