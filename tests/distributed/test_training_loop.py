"""gp.training on two ranks: they agree, and train what one process trains."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_pool import ProcessPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradpolicy as gp

MASKS: dict[str, Any] = {
    "layers": lambda: gp.masks.Layerwise(active=1, every=2),
    "entries": lambda: gp.masks.Random(0.5, every=2),
    "topk": lambda: gp.masks.TopK(0.5, every=2),
}

IN_THE_TABLE = {
    "layers": "tensors",
    "topk": "gradient sources",
    "ddp before": "ddp",
    "ddp within": "ddp",
}


def train(kind: str, masks: str) -> dict[str, Tensor]:
    """The weights after eight updates; each rank takes its half of the data."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(16, 4)
    y = (x.sum(1) > 0).long()
    rank = dist.get_rank() if kind != "one process" else 0
    part = slice(None) if kind == "one process" else slice(8 * rank, 8 * rank + 8)
    plain, given = model, model
    if kind == "ddp before":
        given = DistributedDataParallel(model)
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    settings = {"lr": 0.05, "weight_decay": 0.1}
    if kind == "zero1":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    policies = {"slow": gp.Scale(0.5, modules="2"), "some": gp.Freeze(MASKS[masks](), frozen_state="zero")}
    with gp.training(given, optimizer, policies, seed=1) as optimizer:
        if kind in ("ddp within", "zero1"):
            given = DistributedDataParallel(model)
        for _ in range(8):
            cross_entropy(given(x[part]), y[part]).backward()
            if masks != "topk":
                nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            optimizer.step()
            given.zero_grad()
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in plain.state_dict().items()
    }


@pytest.mark.supports("{masks}", "flow", loop="plain", processes="{kind}", names=IN_THE_TABLE)
@pytest.mark.mostly_slow
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("kind", ["ddp before", "ddp within", "fsdp2", "zero1"])
def test_ranks_train_what_one_process_does(pair: ProcessPool, kind: str, masks: str) -> None:
    first, second = pair(train, kind, masks)
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.testing.assert_close(first, train("one process", masks), rtol=1e-4, atol=1e-5)
