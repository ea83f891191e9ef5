"""Under FSDP2 only the gradients of active rows are computed, and ranks move as one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import all_ranks, weights_of, whole
from process_pool import ProcessPool, here
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradpolicy as gp
from gradpolicy.freezing.row_gradients import _RowForward

SOURCES = {
    "rows that change": lambda: gp.masks.Random(0.3, level="row", every=2),
    "columns": lambda: gp.masks.Rows([0, 3], dim=1),
    "entries": lambda: gp.masks.Random(0.2),
}


class Network(nn.Module):
    """An embedding, attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(hidden.relu()).logsumexp(-1).mean()


def train(rank: int, ranks: int, source: str) -> tuple[dict[str, Tensor], int]:
    """Return the weights after some updates of two batches each, and how often a layer had rows."""
    model: Any = Network().to(here())
    if ranks > 1:
        fully_shard(model.head, mesh=all_ranks())
        fully_shard(model, mesh=all_ranks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    policy = gp.Freeze(SOURCES[source](), params="*weight", frozen_state="drop")
    generator, found = torch.Generator().manual_seed(3), []
    with gp.training(model, optimizer, [policy], seed=0) as optimizer:
        model.head.register_forward_pre_hook(
            lambda head, _: found.append(isinstance(vars(head).get("forward"), _RowForward))
        )
        for number in range(10):
            tokens = torch.randint(0, 11, (4, 3), generator=generator)[rank::ranks].to(here())
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(bool(number % 2))
            (model(tokens) / 2).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    model(tokens).backward()
    gradient = model.head.weight.grad
    # Outside, all is as it was.
    assert all(whole(gradient).any(1))
    return weights_of(model), sum(found)


def train_on_this_rank(source: str) -> tuple[dict[str, Tensor], int]:
    return train(dist.get_rank(), dist.get_world_size(), source)


@pytest.mark.supports("row gradients", "accumulation", "clipping", loop="plain", processes="fsdp2")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", SOURCES)
def test_shards_move_as_one_process(pair: ProcessPool, source: str) -> None:
    (first, found), (second, _) = pair(train_on_this_rank, source)
    alone, _ = train(0, 1, source)
    assert found == (10 if "rows" in source else 0)
    for name, weight in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight)
