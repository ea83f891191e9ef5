"""The binary network: its weights and activations are signs, and learn by a policy only."""

import torch

import gradpolicy as gp
from gradpolicy.tasks.binary import BinaryLinear, BinaryPerceptron


def test_a_binary_layer_multiplies_by_signs() -> None:
    layer, x = BinaryLinear(5, 3), torch.randn(4, 5)
    torch.testing.assert_close(layer(x), x @ layer.weight.sign().T)


def test_hidden_activations_are_signs() -> None:
    model = BinaryPerceptron(hidden=7)
    hidden = model.layers[:2](torch.rand(6, 64))
    assert hidden.shape == (6, 7)
    assert set(hidden.unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_weights_learn_only_under_a_policy() -> None:
    images = torch.rand(8, 1, 8, 8)
    model = BinaryPerceptron()
    weights = [layer[0].weight for layer in model.layers]
    model(images).square().sum().backward()
    assert not any(weight.grad.any() for weight in weights)
    with gp.install(model, [gp.StraightThrough("hardtanh", ops=["sign"])]):
        # Normalised outputs have a constant sum of squares.
        (model(images) - 1).abs().sum().backward()
    assert all(weight.grad.any() for weight in weights)
