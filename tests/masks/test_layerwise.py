"""LISA: k sampled layers, embeddings and head always."""

from collections import Counter

import pytest

import gradpolicy as gp
from gradpolicy.errors import PolicyError

OUTSIDE = ["embed.weight", "head.weight", "head.bias"]


def test_the_embedding_and_the_head_always_train_and_k_layers_with_them(prepared, trained) -> None:
    source = prepared(gp.masks.Layerwise(active=2, every=20))
    for step in range(0, 200, 20):
        masks = source.masks(step, 0)
        layers = {name.rpartition(".")[0] for name in trained(masks) if name.startswith("blocks")}
        assert all(masks[name] is True for name in OUTSIDE)
        assert len(layers) == 2
        assert layers == set(source.active_layers(step, 0))
        assert all(masks[f"{layer}.weight"] is masks[f"{layer}.bias"] is True for layer in layers)


def test_layers_are_sampled_anew_every_k_steps(prepared) -> None:
    source = prepared(gp.masks.Layerwise(active=1, every=5))
    chosen = [source.active_layers(step, 0) for step in range(100)]
    assert all(chosen[step] == chosen[step - step % 5] for step in range(100))
    assert len({tuple(layers) for layers in chosen}) == 4


def test_every_layer_is_equally_likely(prepared) -> None:
    source = prepared(gp.masks.Layerwise(active=2, every=1))
    counts = Counter(layer for step in range(2000) for layer in source.active_layers(step, 0))
    assert all(abs(count - 1000) < 5 * (2000 * 0.25) ** 0.5 for count in counts.values())


def test_more_active_layers_than_there_are_is_an_error(prepared) -> None:
    with pytest.raises(PolicyError, match=r"5 layers wanted, but there are 4: blocks.0"):
        prepared(gp.masks.Layerwise(active=5))
