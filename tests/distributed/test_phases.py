"""Phases on two ranks: one decision by the mean of what the ranks measure, and the same weights."""

import pytest
import torch
import torch.distributed as dist
from loops import on_ranks, share, weights_of
from process_pool import ProcessPool
from torch import Tensor, nn

import gradpolicy as gp

# By what rank 0 measures the first phase would go on; by the mean of both it ends with the third report.
VALUES = ([3.0, 2.0, 1.9, 1.8, 1.7, 1.6], [3.0, 2.0, 2.9, 2.9, 2.9, 2.9])


def train(kind: str, resumed_at: int | None = None) -> tuple[list[int], dict[str, Tensor]]:
    """The phase of each update, and the weights after six; each rank takes its half of the data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x, seen = share(torch.randn(8, 4), kind), []
    given = on_ranks(model, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phases = gp.masks.Phases(
        [{"params": "2.*", "until": {"metric": "loss", "patience": 1}, "best": True}, {"params": "0.*"}]
    )
    with gp.training(given, optimizer, {"thaw": gp.Freeze(phases)}) as masked:
        for step in range(6):
            if step == resumed_at:
                masked.load_state_dict(masked.state_dict())
            given(x).square().mean().backward()
            seen.append(phases.phase)
            masked.step()
            masked.zero_grad()
            phases.report({"loss": VALUES[dist.get_rank()][step]})
    return seen, weights_of(model)


@pytest.mark.supports("phases", loop="plain", processes="{kind}")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_agree_when_a_phase_ends_and_on_its_best_weights(pair: ProcessPool, kind: str) -> None:
    (seen, first), (others, second) = pair(train, kind)
    assert seen == others == [0, 0, 0, 1, 1, 1]
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    for _, resumed in pair(train, kind, 2):
        assert all(torch.equal(value, first[name]) for name, value in resumed.items())
