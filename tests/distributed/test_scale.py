"""A 70-billion-parameter transformer on the meta device: planned and masked within seconds."""

import resource
import time

import pytest
import torch
from torch import Tensor, nn

import gradpolicy as gp
from gradpolicy.tensors.seeded import RandomMask

WIDTH, KEYS, HIDDEN, LAYERS, WORDS = 8192, 1024, 28672, 80, 128256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": WIDTH, "k": KEYS, "v": KEYS, "o": WIDTH, "gate": HIDDEN, "up": HIDDEN}
        for name, outputs in sizes.items():
            self.add_module(name, nn.Linear(WIDTH, outputs, bias=False))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, 128)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.slow
def test_plan_and_masks_of_seventy_billion_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (nn.Linear, nn.Embedding, nn.RMSNorm):
        monkeypatch.setattr(kind, "reset_parameters", lambda self: None)
    with torch.device("meta"):
        model, words = Transformer(), torch.zeros(1, 8, dtype=torch.long)
    policies = {
        "trunk": gp.Freeze(gp.masks.Random(0.1, every=10), params="layers.*"),
        "layers": gp.Freeze(gp.masks.Layerwise(active=2), params="layers.*"),
        "embedding": gp.Freeze(gp.masks.Fixed(), params="embed.*"),
    }
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    plan = gp.plan(model, policies, lambda copied: copied(words).sum())
    source = gp.masks.Random(0.1, every=10)
    source.setup(dict(model.named_parameters()), seed=0)
    masks = source.masks(step=40, epoch=0)
    seconds = time.process_time() - began
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert plan.entries > 70e9
    assert len(masks) == LAYERS * 9 + 2
    assert all(isinstance(mask, RandomMask) for mask in masks.values())
    assert seconds < 60  # It takes a few; masks that are drawn would take minutes.
    assert kilobytes < 1e6
