"""A rank whose part of a tensor is wholly frozen counts the tensor's updates as the other ranks do."""

import pytest
import torch
from process_pool import ProcessPool, here
from test_fully_shard import Facts, facts, network, same, shard
from torch import Tensor

from gradpolicy import MaskedOptimizer


def mask_at(shape: torch.Size, step: int) -> Tensor | None:
    """The first rows alone, the last rows alone, no entry, all: on two ranks a shard often has none."""
    first = torch.arange(shape[0]).view(-1, *(1,) * (len(shape) - 1)) < (shape[0] + 1) // 2
    masks = [first, ~first, torch.zeros(shape, dtype=torch.bool), None, first.expand(shape), None]
    mask = masks[step // 2 % len(masks)]
    return None if mask is None else mask.to(here())


def trained(frozen_state: str, correction: str, sharded: bool = True) -> tuple[Facts, list[int]]:
    model = shard(network()) if sharded else network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.05, amsgrad=True)
    wrapped = MaskedOptimizer(inner, frozen_state=frozen_state, bias_correction=correction)
    for step in range(14):
        for parameter in model.parameters():
            if step % 2 == 0:
                wrapped.set_mask(parameter, mask_at(parameter.shape, step))
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 + step)).to(here())
        wrapped.zero_grad()
        model(inputs).square().mean().backward()
        wrapped.step()
    counts = [int(wrapped.state[parameter].get("step", 0)) for parameter in model.parameters()]
    return facts(model, wrapped), counts


@pytest.mark.slow
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("correction", ["tensor", "entry"])
def test_two_ranks_count_as_one_process(pair: ProcessPool, frozen_state: str, correction: str) -> None:
    alone, counts = trained(frozen_state, correction, sharded=False)
    for found, own_counts in pair(trained, frozen_state, correction):
        assert same(found, alone)
        if correction == "tensor":
            assert own_counts == counts
