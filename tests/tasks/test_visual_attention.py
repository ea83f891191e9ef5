"""Visual attention: what the masks let through, and which gradient the attention gets."""

import pytest
import torch

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.tasks.visual_attention import AttentionClassifier, VisualAttention


def adam(parameters):
    return torch.optim.Adam(parameters)


def test_sampled_masks_are_bits_and_soft_ones_are_the_attention() -> None:
    images = torch.rand(4, 1, 28, 28)
    hard, soft = VisualAttention()(images), VisualAttention(sampled=False)(images)
    assert set(hard.mask.unique().tolist()) == {0.0, 1.0}
    assert hard.mask.shape == hard.attention.shape == (4, 1, 14, 14)
    assert soft.mask is soft.attention


@pytest.mark.parametrize("size", [4, 8, 13, 28])
def test_it_takes_images_of_any_size(size: int) -> None:
    assert VisualAttention(size=size, classes=3)(torch.rand(2, 1, size, size)).logits.shape == (2, 3)


def test_the_attention_learns_only_under_a_policy() -> None:
    images = torch.rand(4, 1, 28, 28)
    model = VisualAttention()
    model(images).logits.square().sum().backward()
    assert not model.attention[0].weight.grad.any()
    with gp.install(model, [gp.StraightThrough(ops=["bernoulli"], modules="mask")]):
        model(images).logits.square().sum().backward()
    assert model.attention[0].weight.grad.any()


def test_the_gradient_of_the_attention_is_features_times_incoming() -> None:
    model, images = VisualAttention(), torch.rand(2, 1, 28, 28)
    kept = {}
    model.mask.register_forward_hook(lambda module, inputs, output: kept.update(attention=inputs[0]))
    model.head.register_forward_pre_hook(lambda module, inputs: kept.update(seen=inputs[0]))
    with gp.install(model, [gp.StraightThrough(ops=["bernoulli"], modules="mask")]):
        loss = model(images).logits.square().sum()
    attention, incoming = torch.autograd.grad(loss, (kept["attention"], kept["seen"]))
    expected = (model.features(images) * incoming).sum(1, keepdim=True)
    torch.testing.assert_close(attention, expected)


def test_the_share_loss_is_zero_at_the_share() -> None:
    task = AttentionClassifier(VisualAttention(), adam, share=0.25, weight=2.0)
    output = VisualAttention()(torch.rand(3, 1, 28, 28))
    labels = torch.zeros(3, dtype=torch.long)
    at_share = output._replace(attention=torch.full((3, 1, 14, 14), 0.25))
    assert task.losses_of(at_share, labels)["share_loss"] == 0
    above = output._replace(attention=torch.full((3, 1, 14, 14), 0.75))
    assert task.losses_of(above, labels)["share_loss"] == pytest.approx(2 * 0.5**2)


def test_an_impossible_share_or_size_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"AttentionClassifier\.share"):
        AttentionClassifier(VisualAttention(), adam, share=1.5)
    with pytest.raises(PolicyError, match=r"VisualAttention\.width"):
        VisualAttention(width=0)
