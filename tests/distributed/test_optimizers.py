"""With other optimizers than Adam two ranks train what one process trains."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes
import pytest
import pytorch_optimizer
import schedulefree
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from process_pool import ProcessPool
from runs import fit
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradpolicy as gp
from gradpolicy.tensors.sharding import full_tensor

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Any]] = {
    "muon": lambda weights: torch.optim.Muon(weights, lr=0.02),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.02),
    "schedule-free": lambda weights: schedulefree.AdamWScheduleFree(weights, lr=0.02),
    "8-bit": lambda weights: bitsandbytes.optim.AdamW8bit(weights, lr=0.02),
    "lamb": lambda weights: pytorch_optimizer.Lamb(weights, lr=0.02),
}
IN_THE_TABLE = {
    "muon": "submatrix optimizers",
    "adafactor": "submatrix optimizers",
    "lamb": "no update rule",
    "one process": "one",
}
# Rounding decides the sign of the step of an entry that has hardly a gradient, and Muon computes in bfloat16.
TOLERANCES = {"muon": 0.1}
# Optimizers whose state is exact for whole tensors alone.
OF_TENSORS = ("lamb",)


def train(kind: str, optimizer: str) -> dict[str, Tensor]:
    """Return how far the weights go in eight updates; each rank takes its half of the data."""
    torch.manual_seed(0)
    # Rows of whole blocks, for the optimizers with 8 bits.
    model: nn.Module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    given: nn.Module = model
    start = copy.deepcopy(model.state_dict())
    inputs = torch.randn(8, 256)
    if kind != "one process":
        inputs = inputs.chunk(2)[dist.get_rank()]
    if kind == "ddp":
        given = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    inner = OPTIMIZERS[optimizer](model.parameters())
    source = gp.masks.Random(0.5, level="tensor" if optimizer in OF_TENSORS else "row", every=2)
    with gp.training(
        given, inner, {"half": gp.Freeze(source, params="[01].*", frozen_state="zero")}
    ) as wrapped:
        if hasattr(wrapped, "train"):
            wrapped.train()
        for _ in range(8):
            given(inputs).square().mean().backward()
            wrapped.step()
            wrapped.zero_grad()
    return {name: full_tensor(weight.detach()) - start[name] for name, weight in model.named_parameters()}


@pytest.mark.supports("{optimizer}", loop="plain", processes="{kind}", names=IN_THE_TABLE)
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [*(("ddp", optimizer) for optimizer in OPTIMIZERS), ("fsdp2", "schedule-free")],
)
def test_ranks_train_what_one_process_does(pair: ProcessPool, kind: str, optimizer: str) -> None:
    first, second = pair(train, kind, optimizer)
    for name, moved in train("one process", optimizer).items():
        assert torch.equal(first[name], second[name]), name
        assert (first[name] - moved).norm() < TOLERANCES.get(optimizer, 0.02) * moved.norm(), name
        assert torch.equal(first[name] == 0, moved == 0), name


def fit_with_several(strategy: str) -> dict[str, Any]:
    def configure(module: LightningModule) -> gp.Optimizers:
        entries: list[dict[str, Any]] = [
            {"params": "layers.*.weight", "optimizer": torch.optim.SGD, "lr": 0.05, "momentum": 0.9},
            {"params": "*", "optimizer": torch.optim.AdamW, "lr": 0.01},
        ]
        return gp.Optimizers(module, entries)

    def prepare(module: LightningModule) -> None:
        module.configure_optimizers = lambda: configure(module)  # type: ignore[method-assign]

    return fit(strategy, "entries", "zero", prepare=prepare)


@pytest.mark.supports("several optimizers", loop="lightning", processes="{strategy}")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_several_optimizers_train_what_one_process_trains(pair: ProcessPool, strategy: str) -> None:
    alone = fit_with_several("one process")
    for together in pair(fit_with_several, strategy):
        for name, weight in alone["weights"].items():
            assert torch.equal(together["masks"][name], alone["masks"][name])
            torch.testing.assert_close(together["weights"][name], weight, rtol=2e-4, atol=2e-5)
