"""The moves that masks need, by Triton kernels on a GPU; `adam` runs the updates."""

from __future__ import annotations

import functools
from array import array
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gradpolicy.machinery import launching
from gradpolicy.optim.native.moves import Index, Packing, Survey

WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes."""
ALIGNMENT = 16
"""Bytes that one instruction reads at most, and so where it must begin."""
NO_PROGRAM = (1 << 63) - 1
"""Where jobs begin that are not."""
Flagged = tuple[Tensor, Tensor]
"""Codes (int8) and as many flags."""


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


def clears(flat: Tensor, active: Tensor) -> bool:
    """Whether `clear` can zero these."""
    if not launching.serve(flat, active):
        return False
    return active.dtype in _FLAGS and flat.element_size() in WIDTHS and not flat.is_complex()


_FLAGS = {torch.bool: None, torch.uint8: None, torch.int8: "int8", torch.int16: "int16", torch.int32: "int32"}
"""Codes, and what flags and bits are given as."""


def clear(vectors: Sequence[tuple[Tensor, Tensor, int]]) -> bool:
    """Zero the entries of many vectors that are not active, where `clears` says so; False where it failed.

    Args:
        vectors: entries in memory order; flags (bool), codes (below 0 where active) or bits (uint8); and how
            many entries one of the former governs.
    """
    together: defaultdict[tuple[Any, ...], list[tuple[int, ...]]] = defaultdict(list)
    for flat, active, block in vectors:
        key = (flat.device, flat.element_size(), active.dtype, block == 1)
        together[key].append((flat.data_ptr(), active.data_ptr(), flat.numel(), block))
    for (device, width, form, single), rows in together.items():
        names, code = source().tl, _FLAGS[form]
        types = {"TYPE": getattr(names, f"int{8 * width}"), "CODE": code and getattr(names, code)}
        aligned = all((values | flags) % ALIGNMENT == 0 for values, flags, *_ in rows)
        constants = {**types, "BITS": form is torch.uint8, "SINGLE": single, "ALIGNED": aligned}
        if not _launch_many(source().clear_many, device, rows, **constants):
            return False
    return True


def survey(flags: Tensor, codes: Tensor | None) -> Survey | None:
    """How many flags are set, and whether they are those in force, for one wait of the device.

    Args:
        flags: bool, one an entry.
        codes: what is in force; None: nothing is compared.
    """
    if not launching.serve(flags) or (codes is not None and not launching.serve(codes)):
        return None
    result = torch.zeros(2, dtype=torch.int64, device=flags.device)
    arguments = (flags.view(torch.uint8), flags if codes is None else codes, result, flags.numel())
    compared = codes is not None
    if not launching.launch(
        source().survey, _wide(flags.numel()), flags.device, *arguments, COMPARED=compared
    ):
        return None
    count, differing = result.tolist()
    return Survey(count, not differing if compared else None)


def survey_many(members: Sequence[Flagged]) -> list[tuple[int, bool]] | None:
    """`survey` of many codes (bytes) and flags of one device, for one wait."""
    if not launching.serve(*chain.from_iterable(members)):
        return None
    result = torch.zeros(2 * len(members), dtype=torch.int64, device=members[0][0].device)
    if not _launch_flagged(source().survey_many, members, result):
        return None
    counts = result.tolist()
    return [(count, bool(differing)) for count, differing in zip(counts[::2], counts[1::2], strict=True)]


def recode_many(members: Sequence[Flagged], table: Tensor) -> bool:
    """`recode` of many codes in place, given their new flags, by one table of bytes."""
    if not launching.serve(*chain.from_iterable(members)):
        return False
    by_code = launching.upload(table.reshape(-1), members[0][0].device)
    return _launch_flagged(source().recode_many, members, by_code, table.shape[-1])


def _launch_flagged(kernel: Any, members: Sequence[Flagged], *arguments: Any) -> bool:
    rows = [
        (codes.data_ptr(), flags.data_ptr(), codes.numel(), 2 * place)
        for place, (codes, flags) in enumerate(members)
    ]
    aligned = all((codes | flags) % ALIGNMENT == 0 for codes, flags, *_ in rows)
    return _launch_many(kernel, members[0][0].device, rows, *arguments, ALIGNED=aligned)


def _launch_many(
    kernel: Any, device: torch.device, rows: Sequence[tuple[int, ...]], *arguments: Any, **constants: Any
) -> bool:
    """Run a kernel over many tensors, of each of which the third number is how many entries there are."""
    room = power_of_two(len(rows))
    starts = [0, *accumulate(-(-row[2] // tile()) for row in rows)]
    programs = starts.pop()
    starts += [NO_PROGRAM] * (room - len(rows))
    written = array("q", chain(starts, *rows))
    table = launching.upload(torch.frombuffer(written, dtype=torch.int64), device)
    return launching.launch(kernel, programs, device, table, *arguments, JOBS=room, **constants)


def power_of_two(count: int) -> int:
    """The next one, `count` itself where it is one."""
    return 1 << max(count - 1, 0).bit_length()


def index(flags: Tensor) -> Index | None:
    """Where flags, or codes below 0, are set; see `index_many`. None where no kernel can do it."""
    found = _indices([(flags, None)])
    return None if found is None else found[0][0]


def index_many(members: Sequence[tuple[Tensor, Tensor | None]]) -> list[Survey] | None:
    """`native.index_many` with counts before each `tile()`, for one wait of the device."""
    found = _indices(members)
    if found is None:
        return None
    indices, seen = found[0], found[1].tolist()
    return [
        Survey(count, None if known is None else not other, index)
        for (_, known), count, other, index in zip(members, seen[::2], seen[1::2], indices, strict=True)
    ]


def _indices(members: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[list[Index], Tensor] | None:
    """The indices; and of each how many flags are set, and how many bytes are not those known."""
    vectors = [vector for member in members for vector in member if vector is not None]
    if not launching.serve(*vectors):
        return None
    first, known = members[0]
    device = first.device
    lengths = [-(-flags.numel() // tile()) + 1 for flags, _ in members]
    heads = [0, *accumulate(lengths)]
    bits = [torch.empty(-(-flags.numel() // 8), dtype=torch.uint8, device=device) for flags, _ in members]
    counts = torch.empty(heads[-1], dtype=torch.int64, device=device)
    seen = torch.zeros(2 * len(members), dtype=torch.int64, device=device)
    rows = [
        (
            flags.data_ptr(),
            0 if before is None else before.data_ptr(),
            flags.numel(),
            packed.data_ptr(),
            counts.data_ptr() + counts.element_size() * head,
            2 * place,
        )
        for place, ((flags, before), packed, head) in enumerate(zip(members, bits, heads, strict=False))
    ]
    constants = {"COMPARED": known is not None, "BELOW_ZERO": first.dtype is not torch.bool}
    aligned = all(row[0] % ALIGNMENT == 0 for row in rows)
    if not _launch_many(source().index_many, device, rows, seen, **constants, ALIGNED=aligned):
        return None
    offsets = _added_up(counts, lengths, heads)
    return [Index(*own, tile()) for own in zip(bits, offsets, strict=True)], seen


def _added_up(counts: Tensor, lengths: list[int], heads: list[int]) -> Sequence[Tensor]:
    """Counts of several tensors that lie one after the other, each from 0 on, added up for each."""
    running = counts.cumsum(0)
    if len(lengths) == 1:
        return [running]
    starts, repeats = launching.upload(torch.tensor([heads[:-1], lengths]), counts.device)
    return (running - running[starts].repeat_interleave(repeats, output_size=heads[-1])).split(lengths)


def repack(packings: Sequence[Packing]) -> bool:
    """Move values between sets of held entries; see `native.repack`. The two must not share memory."""
    together: defaultdict[tuple[Any, ...], list[tuple[int, ...]]] = defaultdict(list)
    for old, new, moves, size in packings:
        for values, result, newcomer in moves:
            if values.element_size() not in WIDTHS or not launching.serve(values, result):
                return False
            key = (values.device, values.element_size(), old is None, new is None)
            known = [(0, 0) if each is None else (*map(Tensor.data_ptr, each[:2]),) for each in (old, new)]
            bits, offsets = zip(*known, strict=True)
            vectors = (values.data_ptr(), result.data_ptr())
            together[key].append((*bits, size, *offsets, *vectors, newcomer))
    return all(_move_alike(key, rows) for key, rows in together.items())


def _move_alike(key: tuple[Any, ...], rows: list[tuple[int, ...]]) -> bool:
    """Move values of as many bytes."""
    device, width, from_all, to_all = key
    constants = {"TYPE": getattr(source().tl, f"int{8 * width}"), "FROM_ALL": from_all, "TO_ALL": to_all}
    return _launch_many(source().move_many, device, rows, **constants)
