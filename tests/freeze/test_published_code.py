"""Masks against those of a published package, run on the same inputs."""

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import gradpolicy as gp

STEPS, EVERY, END = 40, 4, 30


@pytest.fixture
def rigl_torch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package imports torchvision, of which it needs two classes to compare with."""
    if importlib.util.find_spec("torchvision") is None:
        residual = SimpleNamespace(Bottleneck=type("Bottleneck", (), {}), BasicBlock=type("Basic", (), {}))
        stand_in = ModuleType("torchvision")
        stand_in.models = SimpleNamespace(resnet=residual)
        monkeypatch.setitem(sys.modules, "torchvision", stand_in)
    for name in ("rigl_torch", "rigl_torch.RigL", "rigl_torch.util"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("rigl_torch.RigL")


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("density", [0.1, 0.5])
def test_rigl_torch_chooses_the_same_topology(rigl_torch, prepared, density: float, window: int) -> None:
    layer = nn.Linear(24, 16, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    scheduler = rigl_torch.RigLScheduler(
        layer,
        optimizer,
        dense_allocation=density,
        T_end=END,
        ignore_linear_layers=False,
        delta=EVERY,
        alpha=0.4,
        grad_accumulation_n=window,
    )
    weight = torch.zeros(16, 24)
    source = gp.masks.PruneAndGrow(density, fraction=0.4, every=EVERY, stop=END, window=window)
    prepared(source, {"weight": weight})
    first = {"active": {"weight": scheduler.backward_masks[0].clone()}}
    source.load_state_dict({**source.state_dict(), **first})
    changes = 0
    for step in range(1, STEPS):
        gradient = torch.randn(16, 24)
        layer.zero_grad()
        (layer.weight * gradient).sum().backward()
        weight.copy_(layer.weight.detach())
        if source.wants_gradients(step - 1, 0):
            source.observe({"weight": gradient})
        if scheduler():
            optimizer.step()
        else:
            changes += 1
            assert torch.equal(source.masks(step, 0)["weight"], scheduler.backward_masks[0])
            source.apply()
            assert torch.equal(weight, layer.weight)
        assert torch.equal(source.masks(step, 0)["weight"], scheduler.backward_masks[0])
    assert changes == (END - 1) // EVERY
