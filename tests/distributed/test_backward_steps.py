"""Updates in the backward pass on two ranks: FSDP2 moves as one process, DDP is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import all_ranks, on_ranks, weights_of
from process_pool import ProcessPool, here
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import gradpolicy as gp
from gradpolicy.errors import PolicyError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7))


def train(rank: int, ranks: int, level: str) -> dict[str, Tensor]:
    """Return the weights after some updates; of a shard that has no gradient left after a backward pass."""
    model: Any = network().to(here())
    if ranks > 1:
        fully_shard(model[0], mesh=all_ranks())
        fully_shard(model, mesh=all_ranks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    policy = gp.Freeze(gp.masks.Random(0.5, level=level, every=2), params="*weight", frozen_state="drop")
    generator = torch.Generator().manual_seed(3)
    with gp.training(model, optimizer, [policy], seed=0, step_in_backward=True) as optimizer:
        for _ in range(10):
            x = torch.randn(4, 6, generator=generator)[rank::ranks].to(here())
            model(x).square().mean().backward()
            assert all(parameter.grad is None for parameter in model.parameters())
            optimizer.step()
    return weights_of(model)


def train_on_this_rank(level: str) -> dict[str, Tensor]:
    return train(dist.get_rank(), dist.get_world_size(), level)


@pytest.mark.supports("step in backward", loop="plain", processes="fsdp2")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["row", "entry", "tensor"])
def test_shards_move_as_one_process(pair: ProcessPool, level: str) -> None:
    first, second = pair(train_on_this_rank, level)
    alone = train(0, 1, level)
    for name, weight in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight)


def refusal(kind: str) -> str:
    model = on_ranks(network().to(here()), kind)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        with gp.training(model, optimizer, [], step_in_backward=True):
            return "none"
    except PolicyError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["ddp", "a loop that reduces by itself"])
def test_ranks_that_would_diverge_are_refused(pair: ProcessPool, kind: str) -> None:
    for message in pair(refusal, kind):
        assert "the ranks would diverge; expected one process or fully_shard" in message
