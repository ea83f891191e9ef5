"""Guided and deconv against captum and zennit, on networks of distinct nn.ReLU modules."""

import pytest
import torch
from torch import nn

import gradpolicy as gp


@pytest.fixture
def network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


@pytest.fixture
def images():
    return torch.randn(3, 1, 6, 6)


@pytest.mark.parametrize(("policy", "name"), [(gp.Guided, "GuidedBackprop"), (gp.Deconv, "Deconvolution")])
def test_input_gradients_agree_with_captum(network, images, gradient, policy, name):
    attr = pytest.importorskip("captum.attr")
    with gp.install(network, [policy()]):
        ours, _ = gradient(lambda x: network(x)[:, 1], images)
    theirs = getattr(attr, name)(network).attribute(images.clone().requires_grad_(), target=1)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("policy", "name"), [(gp.Guided, "GuidedBackprop"), (gp.Deconv, "DeconvNet")])
def test_input_gradients_agree_with_zennit(network, images, gradient, zennit, policy, name):
    from zennit import composites

    with gp.install(network, [policy()]):
        ours, _ = gradient(lambda x: network(x)[:, 1], images)
    with getattr(composites, name)().context(network):
        theirs, _ = gradient(lambda x: network(x)[:, 1], images)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
