"""The models give what their names say."""

import math

import pytest
import torch

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.models import ConvNet, MultilayerPerceptron, QuantizedConvNet, QuantizedReLU
from gradpolicy.tasks.transformer import CharacterTransformer


def test_the_quantised_activation_has_evenly_spaced_values_between_0_and_1() -> None:
    values = QuantizedReLU(levels=4)(torch.linspace(-2, 2, 401)).unique()
    assert values.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_without_a_straight_through_policy_nothing_before_the_round_learns() -> None:
    model = QuantizedConvNet(width=4)
    model(torch.rand(2, 1, 8, 8)).logits.sum().backward()
    assert all(not parameter.grad.any() for parameter in model.trunk.parameters())
    assert model.head.weight.grad.any()


def test_the_network_takes_other_images_and_classes() -> None:
    output = QuantizedConvNet(channels=3, size=13, classes=4, width=4)(torch.rand(2, 3, 13, 13))
    assert output.logits.shape == output.probe_logits.shape == (2, 4)


def test_the_plain_networks_classify_images_of_their_size() -> None:
    assert ConvNet(channels=3, size=12, classes=4, width=2, hidden=5)(torch.rand(2, 3, 12, 12)).shape == (
        2,
        4,
    )
    perceptron = MultilayerPerceptron(inputs=12, hidden=(7, 5), classes=4)
    assert perceptron(torch.rand(2, 3, 2, 2)).shape == (2, 4)
    assert [tuple(p.shape) for p in perceptron.parameters() if p.dim() == 2] == [(7, 12), (5, 7), (4, 5)]


@pytest.mark.parametrize("bad", [0, -1, 1.5, math.nan, math.inf, 2**70, True])
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (QuantizedReLU, ["levels"]),
        (QuantizedConvNet, ["channels", "size", "classes", "width", "levels"]),
        (ConvNet, ["channels", "size", "classes", "width", "hidden"]),
        (MultilayerPerceptron, ["inputs", "classes"]),
        (CharacterTransformer, ["vocabulary", "context", "width", "layers", "heads"]),
    ],
)
def test_an_impossible_size_is_refused_by_its_name(model: type, sizes: list[str], bad: float) -> None:
    for name in sizes:
        with pytest.raises(PolicyError, match=rf"^{model.__name__}\.{name}: must be"):
            model(**{name: bad})


@pytest.mark.parametrize("model", [QuantizedConvNet, ConvNet, CharacterTransformer])
def test_a_dropout_that_is_no_share_is_refused(model: type) -> None:
    for bad in (math.nan, -0.1, 1.1):
        with pytest.raises(
            PolicyError, match=rf"^{model.__name__}\.dropout: must be a number between 0 and 1"
        ):
            model(dropout=bad)
