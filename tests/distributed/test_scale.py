"""A network of 70 billion parameters on the meta device: planned and masked within seconds."""

import itertools
import resource
import time

import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.tensors.seeded import RandomMask

WIDTH, HIDDEN, LAYERS, WORDS = 8192, 28672, 80, 128256


def block() -> nn.Sequential:
    sizes = itertools.pairwise([WIDTH, HIDDEN, WIDTH, HIDDEN, WIDTH])
    return nn.Sequential(nn.RMSNorm(WIDTH), *(nn.Linear(*size, bias=False) for size in sizes))


def network() -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(WORDS, WIDTH))
    model.add_module("layers", nn.Sequential(*(block() for _ in range(LAYERS))))
    model.add_module("head", nn.Linear(WIDTH, WORDS, bias=False))
    return model


@pytest.mark.slow
def test_plan_and_masks_of_seventy_billion_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (nn.Linear, nn.Embedding, nn.RMSNorm):
        monkeypatch.setattr(kind, "reset_parameters", lambda self: None)
    with torch.device("meta"):
        model, words = network(), torch.zeros(1, 8, dtype=torch.long)
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
    assert len(masks) == LAYERS * 5 + 2
    assert all(isinstance(mask, RandomMask) for mask in masks.values())
    assert seconds < 60  # It takes a few; masks that are drawn would take minutes.
    assert kilobytes < 1e6
