"""Ranks of DDP move as one process where only the gradients of active rows are computed."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import weights_of
from process_pool import ProcessPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradpolicy as gp
from gradpolicy.freezing.row_gradients import _RowForward

Trained = tuple[dict[str, Tensor], int]


class Network(nn.Module):
    """A tied head, and a layer that may be checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.head.weight = self.embedding.weight
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.reentrant is None:
            hidden = self.layer(hidden)
        else:
            hidden = checkpoint(self.layer, hidden, use_reentrant=self.reentrant)
        return self.head(hidden.relu()).logsumexp(-1).mean()


def train(
    ranks: int, reentrant: bool | None, params: str, flow: bool = False, set_to_none: bool = True
) -> Trained:
    """Return the weights after some updates of two batches each and how often modules had rows."""
    plain = Network(reentrant)
    model: nn.Module = DistributedDataParallel(plain) if ranks > 1 else plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    policy = gp.Freeze(gp.masks.Random(0.3, level="row", every=2), params=params, frozen_state="drop")
    policies = [policy, gp.Scale(0.5, ops=["embedding"])] if flow else [policy]
    rank = dist.get_rank() if ranks > 1 else 0
    generator, restricted = torch.Generator().manual_seed(3), 0
    with gp.training(model, optimizer, policies, seed=0) as optimizer:
        for number in range(10):
            tokens = torch.randint(0, 11, (8,), generator=generator)[rank::ranks]
            waits = isinstance(model, DistributedDataParallel) and number % 2 == 0
            with model.no_sync() if waits else contextlib.nullcontext():
                (model(tokens) / 2).backward()
            if number % 2:
                forwards = [vars(module).get("forward") for module in plain.modules()]
                restricted += sum(isinstance(each, _RowForward) for each in forwards)
                nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none)
    return weights_of(plain), restricted


def check_moves(pair: ProcessPool, *arguments: Any, rows: bool = True) -> None:
    """Check that two ranks move as one process, and that some modules had gradients of rows."""
    (first, restricted), (second, _) = pair(train, 2, *arguments)
    alone, _ = train(1, *arguments)
    assert restricted > 0 or not rows
    for name, weight in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight)


@pytest.mark.supports("rows", "row gradients", "accumulation", "clipping", loop="plain", processes="ddp")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("params", ["*.weight", "*"])
@pytest.mark.parametrize(
    "reentrant",
    [
        None,
        *(
            pytest.param(way, marks=pytest.mark.supports("checkpointing", loop="plain", processes="ddp"))
            for way in (False, True)
        ),
    ],
)
def test_ranks_move_as_one_process(pair: ProcessPool, reentrant: bool | None, params: str) -> None:
    check_moves(pair, reentrant, params)


@pytest.mark.filterwarnings("ignore")
def test_a_flow_policy_on_the_embedding(pair: ProcessPool) -> None:
    check_moves(pair, None, "*.weight", True, rows=False)


@pytest.mark.filterwarnings("ignore")
def test_gradients_that_are_not_set_to_none(pair: ProcessPool) -> None:
    check_moves(pair, None, "*", False, False)
