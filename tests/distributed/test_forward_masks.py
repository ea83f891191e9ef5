"""Weights that are masked in the forward pass train on two ranks as on one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import perceptron
from process_pool import ProcessPool, here
from runs import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradpolicy as gp

STEPS = 6


def trained(kind: str, by: str, level: str, resumed_at: int | None = None) -> dict[str, Tensor]:
    """The masked and the whole weights; optionally with all state saved and loaded once."""
    model = perceptron(8, 8, 8, 8).double()
    given: nn.Module = model
    if kind == "ddp":
        given = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh(here().type, (2,)))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double().to(here())
    x = x if kind == "one process" else x.chunk(2)[dist.get_rank()]

    def begun() -> Any:
        source = gp.masks.TopK(None if level == "2:4" else 0.3, level=level, by=by, every=2)
        policy = gp.ForwardMask(source, params="*.weight", decay=0.01)
        return gp.training(given, torch.optim.AdamW(model.parameters(), lr=0.05), [policy])

    def train(optimizer: Any, steps: range) -> None:
        for _ in steps:
            given(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with begun() as optimizer:
        train(optimizer, range(resumed_at or 0))
        state, weights = optimizer.state_dict(), model.state_dict()
    with begun() as optimizer:
        if resumed_at is not None:
            optimizer.load_state_dict(state)
            model.load_state_dict(weights)
        train(optimizer, range(resumed_at or 0, STEPS))
        found = {name: whole(p.detach()) for name, p in model.named_parameters()}
        with optimizer.whole_weights():
            found |= {f"whole {name}": whole(p.detach()) for name, p in model.named_parameters()}
    return found


@pytest.mark.supports("forward masks", loop="plain", processes="{kind}")
@pytest.mark.parametrize(
    ("kind", "by", "level"),
    [
        ("ddp", "magnitude", "entry"),
        ("ddp", "snip", "entry"),
        ("fsdp2", "magnitude", "2:4"),
        ("fsdp2", "magnitude", "entry"),
    ],
)
def test_two_ranks_train_as_one(pair: ProcessPool, kind: str, by: str, level: str) -> None:
    alone = trained("one process", by, level)
    assert (alone["2.weight"] == 0).float().mean() >= 0.5
    assert alone["whole 2.weight"].all()
    for together in (*pair(trained, kind, by, level), *pair(trained, kind, by, level, 3)):
        for name, weight in alone.items():
            torch.testing.assert_close(together[name], weight, rtol=0, atol=1e-12)
            assert torch.equal(together[name] == 0, weight == 0), name
