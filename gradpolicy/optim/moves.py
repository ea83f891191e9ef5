"""Which machinery does the work: the C kernel, a compiled function on a GPU, or plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradpolicy.optim import adam, chunked, cohorts, compiled, native, native_adam
from gradpolicy.optim.cohorts import CHUNK


def update(jobs: Sequence[adam.Job]) -> None:
    """Carry out exact updates."""
    quick: list[adam.Job] = []
    for job in jobs:
        if native_adam.takes(job):
            quick.append(job)
        else:
            adam.run(job, _dense(job))
    if quick:
        native_adam.run(quick)


def _dense(job: adam.Job) -> adam.Dense:
    """What updates a tensor with a code and moments for every entry."""
    return compiled.dense if compiled.wanted(job) else chunked.dense


def recode(codes: Tensor, mask: Tensor, table: Tensor) -> Tensor:
    """New codes; see `cohorts.recode`."""
    result = native.recode(codes, mask, table)
    return cohorts.recode(codes, mask, table) if result is None else result


def fill_frozen(flat: Tensor, active: Tensor, block: int, value: float) -> None:
    """Set entries of frozen blocks to a value, in place.

    Args:
        flat: entries in memory order, viewed by nothing but this.
        active: one flag a block, or one code a block.
        block: entries that a flag governs.
        value: what to write.
    """
    if block == 1 and value == 0 and native.clear(flat, active):
        return
    active = active if active.dtype is torch.bool else active < 0
    if block > 1:
        flat.view(-1, block).index_fill_(0, (~active).nonzero().view(-1), value)
        return
    for start in range(0, flat.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        flat[part].masked_fill_(~active[part], value)
