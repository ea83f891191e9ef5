"""Optimizers that are exact for rows, on two ranks: sharded, they are for whole tensors."""

import warnings

import pytest
import torch
from loops import on_ranks, whole
from process_pool import ProcessPool
from torch import nn

from gradpolicy import MaskedOptimizer

ROWS = torch.arange(8).view(8, 1) % 3 == 1


def masked_shards() -> tuple[list[str], bool]:
    torch.manual_seed(0)
    model = on_ranks(nn.Linear(8, 8, bias=False), "fsdp2")
    optimizer = MaskedOptimizer(torch.optim.Muon(model.parameters()))
    before = whole(model.weight)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.set_mask(model.weight, ROWS)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    frozen = ~ROWS.flatten()
    same = torch.equal(whole(model.weight)[frozen], before[frozen])
    return [str(each.message) for each in caught], same


@pytest.mark.slow
@pytest.mark.supports(
    "submatrix optimizers",
    loop="plain",
    processes="fsdp2",
    no="no error but a warning: rows are restored after a step of the full tensor",
)
def test_rows_of_sharded_parameters_are_put_back(pair: ProcessPool) -> None:
    for said, same in pair(masked_shards):
        assert any(line.startswith("Muon steps whole tensors") for line in said)
        assert same
