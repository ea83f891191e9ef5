"""Rates, and several optimizers as one, on two ranks: they agree, and train what one process trains."""

from typing import Any

import pytest
import torch
from loops import on_ranks, share, weights_of
from process_pool import ProcessPool
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradpolicy as gp

ENTRIES: list[dict[str, Any]] = [
    {"params": "2.*", "optimizer": torch.optim.SGD, "lr": 0.05, "momentum": 0.9},
    {"params": "*", "optimizer": torch.optim.AdamW, "lr": 0.05, "weight_decay": 0.1},
]


def network(kind: str) -> tuple[nn.Module, nn.Module]:
    """A model, and what a loop calls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, on_ranks(model, kind)


def made(model: nn.Module, optimizer: str) -> Any:
    if optimizer == "several":
        return gp.Optimizers(model, ENTRIES)
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, fused=optimizer == "fused")


def policies() -> dict[str, Any]:
    return {
        "decay": gp.Rates({"*": gp.LayerDecay(0.5)}),
        "rates": gp.Rates({"*.bias": {"lr": gp.schedules.Linear(1.0, 0.0, steps=8), "weight_decay": 0.0}}),
        "some": gp.Freeze(gp.masks.Random(0.5, every=2), params="2.*", frozen_state="zero"),
    }


def train(model: nn.Module, given: nn.Module, optimizer: Any, kind: str, steps: range) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    x, y = share(x, kind), share(y, kind)
    for _ in steps:
        cross_entropy(given(x), y).backward()
        optimizer.step()
        given.zero_grad()


def trained(kind: str, optimizer: str) -> dict[str, Tensor]:
    model, given = network(kind)
    with gp.training(given, made(model, optimizer), policies(), seed=1) as wrapped:
        train(model, given, wrapped, kind, range(8))
    return weights_of(model)


@pytest.mark.supports("rates", "entries", loop="plain", processes="{kind}")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("optimizer", ["adamw", "fused", "several"])
def test_ranks_train_what_one_process_does(pair: ProcessPool, kind: str, optimizer: str) -> None:
    first, second = pair(trained, kind, optimizer)
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.testing.assert_close(first, trained("one process", optimizer), rtol=1e-4, atol=1e-5)
