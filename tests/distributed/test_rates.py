"""Rates, and several optimizers as one, on two ranks: they agree, and train what one process trains."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from process_pool import ProcessPool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradpolicy as gp

ENTRIES: list[dict[str, Any]] = [
    {"params": "2.*", "optimizer": torch.optim.SGD, "lr": 0.05, "momentum": 0.9},
    {"params": "*", "optimizer": torch.optim.AdamW, "lr": 0.05, "weight_decay": 0.1},
]
SETTINGS = {"lr": 0.05, "weight_decay": 0.1}


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,))) if kind == "fsdp2" else model


def made(model: nn.Module, kind: str, optimizer: str) -> Any:
    if optimizer == "several":
        return gp.Optimizers(model, ENTRIES)
    if kind == "zero1":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **SETTINGS)
    return torch.optim.AdamW(model.parameters(), **SETTINGS, fused=optimizer == "fused")


def policies() -> dict[str, Any]:
    return {
        "decay": gp.Rates({"*": gp.LayerDecay(0.5)}),
        "rates": gp.Rates({"*.bias": {"lr": gp.schedules.Linear(1.0, 0.0, steps=8), "weight_decay": 0.0}}),
        "some": gp.Freeze(gp.masks.Random(0.5, every=2), params="2.*", frozen_state="zero"),
    }


def train(model: nn.Module, given: nn.Module, optimizer: Any, kind: str, steps: range) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    rank = dist.get_rank() if kind != "one process" else 0
    part = slice(None) if kind == "one process" else slice(8 * rank, 8 * rank + 8)
    for _ in steps:
        cross_entropy(given(x[part]), y[part]).backward()
        optimizer.step()
        given.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def trained(kind: str, optimizer: str) -> dict[str, Tensor]:
    model = network(kind)
    given = DistributedDataParallel(model) if kind in ("ddp", "zero1") else model
    with gp.training(given, made(model, kind, optimizer), policies(), seed=1) as wrapped:
        train(model, given, wrapped, kind, range(8))
    return weights(model)


@pytest.mark.supports("rates", "entries", loop="plain", processes="{kind}")
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [(kind, optimizer) for kind in ("ddp", "fsdp2") for optimizer in ("adamw", "fused", "several")]
    + [("zero1", "adamw")],
)
def test_ranks_train_what_one_process_does(pair: ProcessPool, kind: str, optimizer: str) -> None:
    first, second = pair(trained, kind, optimizer)
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.testing.assert_close(first, trained("one process", optimizer), rtol=1e-4, atol=1e-5)


def saved(optimizer: str, folder: str) -> dict[str, Tensor]:
    """Save after four updates what eight updates come to."""
    model = network("fsdp2")
    with gp.training(model, made(model, "fsdp2", optimizer), policies(), seed=1) as wrapped:
        train(model, model, wrapped, "fsdp2", range(4))
        model_state, state = get_state_dict(model, wrapped)
        dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
        train(model, model, wrapped, "fsdp2", range(4, 8))
    return weights(model)


def resumed(optimizer: str, folder: str) -> dict[str, Tensor]:
    model = network("fsdp2")
    with gp.training(model, made(model, "fsdp2", optimizer), policies(), seed=1) as wrapped:
        model_state, state = get_state_dict(model, wrapped)
        loaded = copy.copy({"model": model_state, "optimizer": state})
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(model, wrapped, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        train(model, model, wrapped, "fsdp2", range(4, 8))
    return weights(model)


@pytest.mark.supports("rates", "entries", "resume", loop="plain", processes="fsdp2")
@pytest.mark.parametrize("optimizer", ["fused", "several"])
def test_a_sharded_run_resumes_bit_for_bit(pair: ProcessPool, tmp_path: Path, optimizer: str) -> None:
    whole = pair(saved, optimizer, str(tmp_path / "saved"))
    again = pair(resumed, optimizer, str(tmp_path / "saved"))
    for name, value in whole[0].items():
        assert torch.equal(value, again[0][name]), name
