"""The models compute what their names promise, and learn under their policies only."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradpolicy as gp
from gradpolicy.tasks.models import MultilayerPerceptron, QuantizedConvNet, QuantizedReLU
from gradpolicy.tasks.transformer import CharacterTransformer
from gradpolicy.tasks.visual_attention import VisualAttention


@pytest.mark.parametrize(
    ("model", "before", "operation"),
    [(QuantizedConvNet(width=4), "trunk", "round"), (VisualAttention(size=8), "attention", "bernoulli")],
)
def test_what_comes_before_a_step_learns_only_under_a_policy(
    model: nn.Module, before: str, operation: str
) -> None:
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8)
    weights = [
        p for module in model.get_submodule(before).modules() for p in module.parameters() if p.dim() > 1
    ]

    def learns() -> list[bool]:
        model.zero_grad()
        output = model(images)
        cross_entropy(getattr(output, "logits", output), labels).backward()
        return [weight.grad is not None and bool(weight.grad.any()) for weight in weights]

    assert not any(learns())
    with gp.install(model, [gp.StraightThrough(ops=[operation])]):
        assert all(learns())


def test_the_quantised_activation_has_evenly_spaced_values_between_0_and_1() -> None:
    values = QuantizedReLU(levels=4)(torch.linspace(-2, 2, 401)).unique()
    assert values.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_the_networks_classify_images_of_their_size() -> None:
    output = QuantizedConvNet(size=13, classes=4, width=4)(torch.rand(2, 1, 13, 13))
    assert output.logits.shape == output.probe_logits.shape == (2, 4)
    perceptron = MultilayerPerceptron(inputs=12, hidden=(7, 5), classes=4)
    assert perceptron(torch.rand(2, 3, 2, 2)).shape == (2, 4)
    assert [tuple(p.shape) for p in perceptron.parameters() if p.dim() == 2] == [(7, 12), (5, 7), (4, 5)]
    for size in (4, 13, 28):
        assert VisualAttention(size=size, classes=3)(torch.rand(2, 1, size, size)).logits.shape == (2, 3)


@pytest.mark.parametrize("bad", [0, 1.5, math.nan, 2**70, True])
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (QuantizedReLU, ["levels"]),
        (QuantizedConvNet, ["size", "classes", "width", "levels"]),
        (MultilayerPerceptron, ["inputs", "classes"]),
        (CharacterTransformer, ["vocabulary", "context", "width", "layers", "heads"]),
        (VisualAttention, ["size", "classes", "width"]),
    ],
)
def test_an_impossible_size_is_refused_by_its_name(model: type, sizes: list[str], bad: float) -> None:
    for name in sizes:
        with pytest.raises(gp.PolicyError, match=rf"^{model.__name__}\.{name}: expected"):
            model(**{name: bad})


# ---- visual attention


def test_sampled_masks_are_bits_and_soft_ones_are_the_attention() -> None:
    images = torch.rand(4, 1, 28, 28)
    hard, soft = VisualAttention()(images), VisualAttention(sampled=False)(images)
    assert set(hard.mask.unique().tolist()) == {0.0, 1.0}
    assert hard.mask.shape == hard.attention.shape == (4, 1, 14, 14)
    assert soft.mask is soft.attention


def test_the_share_loss_is_zero_at_the_share() -> None:
    model, images = VisualAttention(share=0.25), torch.rand(3, 1, 28, 28)
    for share, loss in ((0.25, 0.0), (0.75, 10 * 0.5**2)):
        nn.init.zeros_(model.attention[2].weight)
        nn.init.constant_(model.attention[2].bias, math.log(share / (1 - share)))
        assert model(images).losses["share_loss"].item() == pytest.approx(loss, abs=1e-6)
    with pytest.raises(gp.PolicyError, match=r"VisualAttention\.share"):
        VisualAttention(share=1.5)


# ---- the transformer


def test_a_character_changes_no_prediction_before_it() -> None:
    transformer = CharacterTransformer(vocabulary=11, context=8, width=16, layers=2, heads=2).eval()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    difference = (transformer(tokens) - transformer(changed)).abs().amax(dim=-1)[0]
    assert not difference[:5].any()
    assert difference[5:].all()
