"""The C kernel: compiled once by the system's compiler, kept in a cache folder, called without the GIL.

Here are the moves that masks need; `adam` runs the updates. Where there is no compiler, the loops of
`jitted` do it, which is said once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradpolicy.machinery.compiling import compiled

GRAIN = 1 << 14
"""Entries between two stored counts, so that work can start in the middle of a tensor; fewer on a GPU."""


class Index(NamedTuple):
    """Where flags are set.

    Attributes:
        bits: eight flags a byte, the first in the lowest.
        offsets: int64, how many are set before each `grain` entries and in all.
        grain: entries between two offsets.
    """

    bits: Tensor
    offsets: Tensor
    grain: int = GRAIN


Clearing = tuple[Tensor, Tensor, int]
"""Entries in memory order; flags (bool), codes (int8) or bits (uint8); how many entries a flag governs."""
Packing = tuple[Index | None, Index | None, Sequence[tuple[Tensor, Tensor, int]], int]
"""One tensor's values to move: the index of the entries in them, and of those in the results; None: all.
Then up to four vectors: what is held now; the result, which is filled, and may share memory with the former
where both indices are given; and a number for entries that are not held now, 0 where these are no codes. At
last the entries of the whole tensor."""

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS = {
    "adam": [_POINTER, _LONG, _POINTER, _INT],
    "recode": [*[_POINTER] * 3, *[_LONG] * 2, *[_INT] * 3],
    "clear": [_POINTER, _LONG, _POINTER, _INT],
    "survey": [*[_POINTER] * 3, _LONG, _INT, _POINTER, _INT],
    "survey_many": [_POINTER, _LONG, _POINTER, _INT],
    "recode_many": [_POINTER, _LONG, _POINTER, _LONG, *[_INT] * 3],
    "index_many": [_POINTER, _LONG, _POINTER, _POINTER, _INT],
    "repack": [_POINTER, _LONG, _INT],
}
_RESULTS = {"survey": _LONG, "repack": _INT}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel; None, and one warning, where it cannot be had."""
    source = Path(__file__).with_name("kernel.c")
    loaded = compiled(source)
    return None if loaded is None else declared(loaded)


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """The kernel with its functions' types."""
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, f"gradpolicy_{name}")
        function.argtypes, function.restype = arguments, _RESULTS.get(name)
    return loaded


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _on_cpu(*tensors: Tensor | None) -> bool:
    for tensor in tensors:
        if tensor is not None and not (tensor.is_cpu and tensor.is_contiguous()):
            return False
    return True


def recode(codes: Tensor, mask: Tensor, table: Tensor) -> Tensor | None:
    """`cohorts.recode` for bytes, in place; None where the kernel cannot do it."""
    small = codes.dtype is table.dtype is torch.int8 and 1 < codes.numel() == mask.numel()
    kernel = library() if small and _on_cpu(codes, mask) else None
    if kernel is None:
        return None
    by_byte, thaw, freeze = _by_byte(table)
    addresses = (codes.data_ptr(), mask.data_ptr(), by_byte.data_ptr())
    sizes = (codes.numel(), table.shape[-1], thaw, freeze)
    kernel.gradpolicy_recode(*addresses, *sizes, torch.get_num_threads())
    return codes


def survey_many(members: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[int, bool]] | None:
    """Of many codes (bytes) and flags: how many are set, and whether they differ from what is in force."""
    kernel = library() if all(_on_cpu(*member) for member in members) else None
    if kernel is None:
        return None
    rows = _rows(members)
    room = (ctypes.c_int64 * -(-max(codes.numel() for codes, _ in members) // GRAIN))()
    kernel.gradpolicy_survey_many(rows, len(members), room, torch.get_num_threads())
    return [(rows[place], bool(rows[place + 1])) for place in range(3, len(rows), _FIELDS)]


def recode_many(members: Sequence[tuple[Tensor, Tensor]], table: Tensor) -> bool:
    """`recode` of many codes in place, given their new flags, by one table of bytes."""
    kernel = library()
    if kernel is None:
        return False
    by_byte, thaw, freeze = _by_byte(table)
    sizes = (table.shape[-1], thaw, freeze, torch.get_num_threads())
    kernel.gradpolicy_recode_many(_rows(members), len(members), by_byte.data_ptr(), *sizes)
    return True


_FIELDS = 5


def _rows(members: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """`flagged` of kernel.c, of codes and flags."""
    fields = [(codes.data_ptr(), flags.data_ptr(), codes.numel(), 0, 0) for codes, flags in members]
    return (ctypes.c_int64 * (_FIELDS * len(members)))(*chain.from_iterable(fields))


@functools.lru_cache(maxsize=16)
def _by_byte(table: Tensor) -> tuple[Tensor, int, int]:
    """A table of [flag][old code], and the codes of all that thaw and of all that freeze.

    The codes are (0, 0) where these have more than one, or where others change too.
    """
    width = table.shape[-1]
    by_byte = torch.zeros(2, 2, 128, dtype=torch.int8, device="cpu")
    by_byte[..., :width] = table
    slots = torch.arange(width, dtype=torch.int8, device="cpu")
    stay = torch.equal(table[0, 0], slots) and torch.equal(table[1, 1], slots - 128)
    freeze, thaw = int(table[0, 1, 0]), int(table[1, 0, 0])
    if stay and bool((table[0, 1] == freeze).all() and (table[1, 0] == thaw).all()):
        return by_byte, thaw, freeze
    return by_byte, 0, 0


def clears(vectors: Sequence[Clearing]) -> bool:
    """Whether `clear` can zero these."""
    flats, actives = [flat for flat, *_ in vectors], [active for _, active, _ in vectors]
    sized = {*map(Tensor.element_size, flats)} <= {2, 4, 8} and {*map(Tensor.element_size, actives)} <= {1}
    return sized and _on_cpu(*flats, *actives) and library() is not None


def clear(vectors: Sequence[Clearing]) -> bool:
    """Zero the entries of many vectors that are not active; False where the kernel cannot do it."""
    kernel = library() if clears(vectors) else None
    if kernel is None:
        return False
    marks = [flat.element_size() | _MARK[active.dtype] << 32 for flat, active, _ in vectors]
    fields = [
        (flat.data_ptr(), active.data_ptr(), flat.numel(), block, mark)
        for (flat, active, block), mark in zip(vectors, marks, strict=True)
    ]
    each = (ctypes.c_int64 * (5 * len(fields)))(*chain.from_iterable(fields))
    first_parts = (ctypes.c_int64 * (len(vectors) + 1))()
    kernel.gradpolicy_clear(each, len(vectors), first_parts, torch.get_num_threads())
    return True


_MARK = {torch.bool: 1, torch.int8: 0x80, torch.uint8: 0}
"""The bit of a byte that tells of an active entry; 0: a byte has the bits of eight."""


@dataclass(frozen=True)
class Survey:
    """What one look at flags tells.

    Attributes:
        count: how many are set.
        same: whether they are those in force; None: not looked at.
        index: where they are set, see `index_many`; None: not made.
    """

    count: int
    same: bool | None = None
    index: Index | None = None


def survey(flags: Tensor, codes: Tensor | None = None) -> Survey | None:
    """One look at flags (bool), or at codes (int8), below 0 where set; None where the kernel cannot do it.

    Args:
        flags: what to look at.
        codes: as many codes, to compare with.
    """
    codes = codes if codes is not None and codes.dtype is torch.int8 else None
    possible = flags.dtype in _SHIFTS and _on_cpu(flags, codes)
    kernel = library() if possible else None
    if kernel is None:
        return None
    size, differ = flags.numel(), ctypes.c_int()
    room = (ctypes.c_int64 * -(-size // GRAIN))()
    answer = (_SHIFTS[flags.dtype], ctypes.addressof(differ), torch.get_num_threads())
    count = kernel.gradpolicy_survey(flags.data_ptr(), _address(codes), room, size, *answer)
    return Survey(count, None if codes is None else not differ.value)


_SHIFTS = {torch.bool: 0, torch.int8: 7}
"""The bit that tells of a flag, and of a code."""


def count(flags: Tensor) -> int:
    """How many flags are True."""
    found = survey(flags)
    return int(flags.count_nonzero()) if found is None else found.count


def index_many(members: Sequence[tuple[Tensor, Tensor | None]]) -> list[Survey] | None:
    """Where flags (bool), or codes (int8, below 0), are set; None where the kernel cannot do it.

    Args:
        members: flags of a tensor each, and as many bits to compare with.

    Returns:
        With the indices.
    """
    possible = all(flags.dtype in _SHIFTS and _on_cpu(flags, known) for flags, known in members)
    kernel = library() if possible else None
    if kernel is None:
        return None
    indices: list[Index] = []
    fields: list[tuple[int, ...]] = []
    for flags, known in members:
        size = flags.numel()
        bits = torch.empty(-(-size // 8), dtype=torch.uint8, device="cpu")
        offsets = torch.empty(-(-size // GRAIN) + 1, dtype=torch.int64, device="cpu")
        indices.append(Index(bits, offsets))
        addresses = (flags.data_ptr(), _address(known) or 0, bits.data_ptr(), offsets.data_ptr())
        fields.append((*addresses, size, _SHIFTS[flags.dtype], 0, 0))
    rows = (ctypes.c_int64 * (8 * len(members)))(*chain.from_iterable(fields))
    room, differ = (ctypes.c_int64 * (len(members) + 1))(), (ctypes.c_int * len(members))()
    kernel.gradpolicy_index_many(rows, len(members), room, differ, torch.get_num_threads())
    found = zip(rows[6::8], rows[7::8], indices, members, strict=True)
    return [
        Survey(count, None if known is None else not differs, index)
        for count, differs, index, (_, known) in found
    ]


def index(flags: Tensor) -> Index | None:
    """The index of `index_many` for one tensor."""
    found = index_many([(flags, None)])
    return None if found is None else found[0].index


def repack(packings: Sequence[Packing]) -> bool:
    """Move values of tensors between sets of held entries; False where the kernel cannot."""
    vectors = [
        vector for *_, moves, _ in packings for values, result, _ in moves for vector in (values, result)
    ]
    possible = _on_cpu(*vectors) and all(vector.element_size() in (1, 2, 4, 8) for vector in vectors)
    kernel = library() if possible else None
    if kernel is None:
        return False
    streams = [
        (values.data_ptr(), result.data_ptr(), values.element_size() | (newcomer & 0xFFFFFFFF) << 32)
        for *_, moves, _ in packings
        for values, result, newcomer in moves
    ]
    written = (ctypes.c_uint64 * (3 * len(streams)))(*chain.from_iterable(streams))
    place, fields = ctypes.addressof(written), []
    for old, new, moves, size in packings:
        known = [(0, 0) if index is None else (*map(Tensor.data_ptr, index[:2]),) for index in (old, new)]
        fields.append((*chain.from_iterable(zip(*known, strict=True)), place, size, len(moves)))
        place += 24 * len(moves)
    rows = (ctypes.c_uint64 * (7 * len(fields)))(*chain.from_iterable(fields))
    return bool(kernel.gradpolicy_repack(rows, len(fields), torch.get_num_threads()))
