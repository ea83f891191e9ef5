"""Frozen modules stand still on every rank, whether or not DistributedDataParallel broadcasts buffers."""

import pytest
import torch
import torch.distributed as dist
from process_pool import ProcessPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradpolicy as gp

FIXED = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def trains_at_first(name: str, parameter: Tensor, step: int) -> bool:
    return step < 4


def train(broadcast: bool) -> list[tuple[Tensor, ...]]:
    """Statistics of the trunk and its output in training, after each update in which it rests."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2))
    model = nn.Sequential(trunk, nn.Linear(6, 2))
    given = DistributedDataParallel(model, broadcast_buffers=broadcast)
    policy = gp.Freeze(trains_at_first, params="0.*", buffers="eval")
    seen: list[tuple[Tensor, ...]] = []
    with gp.training(given, torch.optim.AdamW(model.parameters(), lr=0.05), [policy]) as optimizer:
        for step in range(8):
            torch.manual_seed(10 * step + dist.get_rank())
            given(torch.randn(16, 6) + dist.get_rank()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            given.train()
            if step >= 4:
                statistics = [buffer.clone() for buffer in trunk.buffers()]
                seen.append((*statistics, trunk(FIXED).detach()))
    return seen


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_frozen_trunk_stands_still_on_each_rank(pair: ProcessPool, broadcast: bool) -> None:
    for seen in pair(train, broadcast):
        first, *others = seen
        assert len(others) == 3
        for other in others:
            assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
