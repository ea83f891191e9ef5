"""Which machinery does the work: the C kernel, numba's loops, the Triton kernels on a GPU, or torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradpolicy.optim import adam, cohorts, compiled
from gradpolicy.optim.gpu import moves as gpu_moves
from gradpolicy.optim.jitted import adam as jitted_adam
from gradpolicy.optim.jitted import moves as jitted
from gradpolicy.optim.native import moves as native
from gradpolicy.optim.packed import Held, index_many


def update(jobs: Sequence[adam.Job]) -> None:
    """Carry out exact updates that are neither the C kernel's nor the GPU's."""
    looped: list[adam.Job] = []
    others: list[adam.Job] = []
    for job in jobs:
        (looped if jitted_adam.takes(job) else others).append(job)
    if looped:
        jitted_adam.run(looped)
    for job in others:
        adam.run(job, _dense(job))


def _dense(job: adam.Job) -> adam.Dense:
    """What updates a tensor with a code and moments for every entry."""
    return compiled.dense if compiled.wanted(job) else adam.dense_in_chunks


def recode(codes: Tensor, mask: Tensor, table: Tensor) -> Tensor:
    """New codes; see `cohorts.recode`."""
    for recode in (gpu_moves.recode, native.recode, jitted.recode):
        result = recode(codes, mask, table)
        if result is not None:
            return result
    return cohorts.recode(codes, mask, table)


def survey(flags: Tensor, codes: Tensor, held: Held | None) -> native.Survey:
    """How many flags are set, and whether they are the ones in force.

    A GPU is waited for once, however much is asked; a CPU reads the flags once, and makes their index too
    where memory is held for active entries alone.

    Args:
        flags: one a block.
        codes: what is in force; compared where there are as many.
        held: the same where memory is held for active entries alone.
    """
    if held is not None and held.bits is not None and flags.numel() == held.size:
        indexed = index_many([(held, flags)])
        if indexed is not None:
            return indexed[0]
    known = codes if held is None and flags.numel() == codes.numel() else None
    found = gpu_moves.survey(flags, known) or native.survey(flags, known)
    return found or native.Survey(int(flags.count_nonzero()))


def survey_many(members: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[int, bool]] | None:
    """Of many codes (bytes) and flags: how many are set, and whether they differ; None: no kernel can."""
    return gpu_moves.survey_many(members) or native.survey_many(members)


def recode_many(members: Sequence[tuple[Tensor, Tensor]], table: Tensor) -> None:
    """New codes in place of many old ones, by one table of bytes."""
    if gpu_moves.recode_many(members, table) or native.recode_many(members, table):
        return
    for codes, flags in members:
        codes.copy_(recode(codes, flags, table))


def fill_frozen(flat: Tensor, active: Tensor | Held, block: int, value: float) -> None:
    """Set entries of frozen blocks to a value, in place.

    Args:
        flat: entries in memory order, viewed by nothing but this.
        active: one flag a block, or one code a block, or where the active blocks are.
        block: entries that a flag governs.
        value: what to write.
    """
    if value == 0:
        clear_frozen([(flat, active, block)])
    else:
        _fill(flat, active.flags() if isinstance(active, Held) else active, block, value)


def clear_frozen(vectors: Sequence[tuple[Tensor, Tensor | Held, int]]) -> None:
    """`fill_frozen` with 0 for many vectors, at once where a kernel can do it."""
    on_gpu: list[native.Clearing] = []
    others: list[native.Clearing] = []
    for flat, given, block in vectors:
        active = _plain(flat, given)
        (on_gpu if gpu_moves.clears(flat, active) else others).append((flat, active, block))
    if on_gpu and not gpu_moves.clear(on_gpu):
        # From now on no kernel is used there.
        others += on_gpu
    if others and not native.clear(others):
        for flat, active, block in others:
            if not native.clear([(flat, active, block)]):
                _clear_without(flat, active, block)


def _clear_without(flat: Tensor, active: Tensor, block: int) -> None:
    """Without the C kernel."""
    if block > 1 or not jitted.clear(flat, active):
        _fill(flat, active, block, 0.0)


def _plain(flat: Tensor, active: Tensor | Held) -> Tensor:
    """Flags, codes, or bits where a kernel can read them."""
    if not isinstance(active, Held):
        return active
    bits = active.bits
    usable = bits is not None and (gpu_moves.clears(flat, bits) or native.clears([(flat, bits, 1)]))
    return bits if bits is not None and usable else active.flags()


def _fill(flat: Tensor, active: Tensor, block: int, value: float) -> None:
    active = active if active.dtype is torch.bool else active < 0
    if block > 1 and not flat.is_cpu:
        flat.view(-1, block).masked_fill_(active.logical_not().unsqueeze(1), value)
        return
    if block > 1:
        flat.view(-1, block).index_fill_(0, (~active).nonzero().view(-1), value)
        return
    count = cohorts.chunk(flat.device)
    for start in range(0, flat.numel(), count):
        part = slice(start, start + count)
        flat[part].masked_fill_(~active[part], value)
