"""The moves that masks need, by Triton kernels on a GPU; `adam` runs the updates."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from gradpolicy.machinery import launching

WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes."""


@functools.cache
def source() -> ModuleType:
    """The kernels, where there is Triton."""
    found = launching.module("gradpolicy.optim.gpu.kernels")
    assert found is not None
    return found


def tile() -> int:
    """Entries between two stored counts of held ones."""
    return int(source().TILE.value)


def _wide(count: int) -> int:
    return -(-count // int(source().WIDE.value))


def _whole(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers."""
    return tensor.view(WIDTHS[tensor.element_size()])


def recode(codes: Tensor, mask: Tensor, table: Tensor) -> Tensor | None:
    """`cohorts.recode`, in place where codes keep their width; None where the kernel cannot do it."""
    count, device = codes.numel(), codes.device
    if not 1 < count == mask.numel() or not launching.serve(codes, mask):
        return None
    result = codes if codes.dtype is table.dtype else torch.empty_like(codes, dtype=table.dtype)
    by_code = launching.upload(table.reshape(-1), device)
    flags, bits = mask.view(torch.uint8), 8 * codes.element_size()
    arguments = (codes, flags, by_code, result, count, table.shape[-1])
    return (
        result if launching.launch(source().recode, _wide(count), device, *arguments, OLD_BITS=bits) else None
    )


def clear(flat: Tensor, active: Tensor, block: int) -> bool:
    """Zero entries of blocks that are not active (flags, or codes); False where the kernel cannot do it."""
    if flat.element_size() not in WIDTHS or flat.is_complex() or not launching.serve(flat, active):
        return False
    below_zero, count = active.dtype is not torch.bool, flat.numel()
    flags = active if below_zero else active.view(torch.uint8)
    programs = -(-count // tile())
    constants = {"BELOW_ZERO": below_zero, "SINGLE": block == 1}
    return launching.launch(
        source().clear_frozen, programs, flat.device, _whole(flat), flags, count, block, **constants
    )


def survey(flags: Tensor, known: Tensor | None, packed: bool = False) -> tuple[int, int] | None:
    """How many flags are set, and how many differ from what is in force, for one wait of the device.

    Args:
        flags: bool, one an entry.
        known: codes, or with `packed` bits; None: nothing is compared.
        packed: see `known`.
    """
    if not launching.serve(flags) or (known is not None and not launching.serve(known)):
        return None
    result = torch.zeros(2, dtype=torch.int64, device=flags.device)
    arguments = (flags.view(torch.uint8), flags if known is None else known, result, flags.numel())
    constants = {"PACKED": packed, "COMPARED": known is not None}
    if not launching.launch(source().survey, _wide(flags.numel()), flags.device, *arguments, **constants):
        return None
    count, differing = result.tolist()
    return count, differing


def bits(flags: Tensor) -> tuple[Tensor, Tensor] | None:
    """Flags, or codes below 0, as bits, and how many in each `tile()`; None where no kernel can do it."""
    if not launching.serve(flags):
        return None
    below_zero, count = flags.dtype is not torch.bool, flags.numel()
    packed = torch.empty(-(-count // 8), dtype=torch.uint8, device=flags.device)
    counts = torch.empty(-(-count // tile()), dtype=torch.int64, device=flags.device)
    values = flags if below_zero else flags.view(torch.uint8)
    arguments = (values, packed, counts, count)
    done = launching.launch(
        source().pack_bits, counts.numel(), flags.device, *arguments, BELOW_ZERO=below_zero
    )
    return (packed, counts) if done else None


def repack(
    old: tuple[Tensor, Tensor] | None,
    new: tuple[Tensor, Tensor] | None,
    values: Tensor,
    result: Tensor,
    size: int,
    newcomer: int = 0,
) -> bool:
    """Move values between sets of held entries; see `native.repack`. The two must not share memory."""
    if values.element_size() not in WIDTHS or values.is_complex() or not launching.serve(values, result):
        return False
    index = [*(old or (values, values)), *(new or (values, values))]
    arguments = (*index, _whole(values), _whole(result), size, newcomer)
    constants = {"FROM_ALL": old is None, "TO_ALL": new is None}
    return launching.launch(source().move, -(-size // tile()), values.device, *arguments, **constants)
