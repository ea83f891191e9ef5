"""The moves that masks need in numba's loops, where the C kernel cannot do them.

What `native.moves` is to kernel.c, this is to loops.py; `adam` runs the updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradpolicy.machinery.jitting import in_parallel, loops, parts
from gradpolicy.optim.native.moves import GRAIN, Index, Packing

SEGMENT = 16
"""GRAINs a thread takes at once."""
PART = SEGMENT * GRAIN
"""Entries a thread takes at once."""
SHOWN_AS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.bool: torch.uint8}
"""Types that NumPy or the loops lack, and whole numbers of as many bytes."""
WHOLE = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def library() -> Any:
    """The loops; None where numba cannot be had."""
    return loops("gradpolicy.optim.jitted.loops")


def array(tensor: Tensor, shown_as: torch.dtype | None = None) -> np.ndarray:
    """A tensor's own memory, as whole numbers where NumPy does not know its type."""
    shown_as = shown_as or SHOWN_AS.get(tensor.dtype)
    own = tensor.detach()
    return (own if shown_as is None else own.view(shown_as)).numpy()


def _run(loop: Callable[..., Any], *arguments: Any, size: int, part: int = PART) -> None:
    in_parallel(list(parts(loop, *arguments, size=size, part=part)))


def _on_cpu(*tensors: Tensor) -> bool:
    return all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)


def recode(codes: Tensor, mask: Tensor, table: Tensor) -> Tensor | None:
    """`cohorts.recode`; None where the loops cannot do it."""
    if not _one_by_one(codes, mask) or library() is None:
        return None
    by_code = _by_code(table.view(2, -1), codes.dtype)
    result = codes if codes.dtype is table.dtype else torch.empty_like(codes, dtype=table.dtype)
    arrays = (_unsigned(codes), array(mask), array(by_code), array(result))
    _run(library().recode, *arrays, size=codes.numel())
    return result


def pairs_seen(codes: Tensor, mask: Tensor, width: int) -> Tensor | None:
    """The flags that `cohorts.pairs_present` reads; None where the loops cannot do it."""
    if not _one_by_one(codes, mask) or library() is None:
        return None
    lowest = torch.iinfo(codes.dtype).max + 1
    seen = torch.zeros(2, 2 * lowest, dtype=torch.bool, device="cpu")
    _run(library().mark, _unsigned(codes), array(mask), array(seen), size=codes.numel())
    return seen.view(2, 2, lowest)[..., :width].reshape(-1)


def _one_by_one(codes: Tensor, mask: Tensor) -> bool:
    return 1 < codes.numel() == mask.numel() and codes.element_size() <= 2 and _on_cpu(codes, mask)


def _unsigned(codes: Tensor) -> np.ndarray:
    return array(codes, WHOLE[codes.element_size()])


def _by_code(table: Tensor, dtype: torch.dtype) -> Tensor:
    """A table of [flag][frozen or active][slot], with a place for each code: active ones come last."""
    lowest = torch.iinfo(dtype).max + 1
    spread = torch.zeros(2, 2, lowest, dtype=table.dtype, device="cpu")
    spread[..., : table.shape[1] // 2] = table.view(2, 2, -1)
    return spread.view(2, -1)


def clear(flat: Tensor, active: Tensor) -> bool:
    """Zero the entries that are not active (flags, or codes); False where the loops cannot do it."""
    possible = flat.element_size() in WHOLE and active.element_size() == 1 and _on_cpu(flat, active)
    if not possible or library() is None:
        return False
    shift = 7 if active.dtype is torch.bool else 0
    arrays = (array(flat, WHOLE[flat.element_size()]), array(active, torch.int8))
    _run(library().clear, *arrays, shift, size=flat.numel())
    return True


def index(flags: Tensor) -> Index | None:
    """`native.index`; None where the loops cannot do it."""
    if flags.element_size() > 1 or not _on_cpu(flags) or library() is None:
        return None
    count, shift = flags.numel(), 0 if flags.dtype is torch.bool else 7
    bits = torch.zeros(-(-count // 8), dtype=torch.uint8, device="cpu")
    offsets = torch.zeros(-(-count // GRAIN) + 1, dtype=torch.int64, device="cpu")
    counts = array(offsets)[1:]
    _run(library().pack_bits, array(flags, torch.uint8), shift, array(bits), counts, size=count)
    np.cumsum(counts, out=counts)
    return Index(bits, offsets)


def repack(packings: Sequence[Packing]) -> bool:
    """`native.repack`; False where the loops cannot do it."""
    vectors = [
        vector for *_, moves, _ in packings for values, result, _ in moves for vector in (values, result)
    ]
    if not _on_cpu(*vectors) or library() is None:
        return False
    for old, new, moves, size in packings:
        alike: dict[tuple[int, int, int | None], list[tuple[Tensor, Tensor]]] = {}
        for values, result, newcomer in moves:
            key = values.element_size(), newcomer, _shift(values, result)
            alike.setdefault(key, []).append((values, result))
        for (_, newcomer, shift), pairs in alike.items():
            _repack_alike(_arrays(old), _arrays(new), pairs, newcomer, shift, size)
    return True


Arrays = tuple[np.ndarray, np.ndarray]


def _arrays(index: Index | None) -> Arrays:
    """Bits and offsets, empty where all entries are held."""
    return (
        (np.empty(0, np.uint8), np.empty(0, np.int64))
        if index is None
        else (array(index[0]), array(index[1]))
    )


def _shift(values: Tensor, result: Tensor) -> int | None:
    """How many values after the old ones the new ones begin; None: in memory of their own."""
    if values.untyped_storage().data_ptr() != result.untyped_storage().data_ptr():
        return None
    return (result.data_ptr() - values.data_ptr()) // values.element_size()


def _repack_alike(
    old: Arrays,
    new: Arrays,
    pairs: Sequence[tuple[Tensor, Tensor]],
    newcomer: int,
    shift: int | None,
    size: int,
) -> None:
    """Move vectors of one size of value, which lie alike."""
    width = pairs[0][0].element_size()
    sources, results = (
        tuple(array(vector, WHOLE[width]) for vector in each) for each in zip(*pairs, strict=True)
    )
    count, kind = -(-size // GRAIN), sources[0].dtype
    copies, copy_at = tuple(source[:0] for source in sources), np.empty(0, np.int64)
    if shift is not None:
        copies, copy_at = _copy_out(sources, old[1], _in_danger(old[1], new[1], shift))
    value, backwards = kind.type(newcomer % (1 << (8 * width))), shift is not None and shift >= 0
    arguments = (old, new, sources, results, copies, copy_at, value, size, backwards)
    _run(library().repack, *arguments, size=count, part=SEGMENT)


def _in_danger(old: np.ndarray, new: np.ndarray, shift: int) -> np.ndarray:
    """Whether the values of each GRAIN would be written over before they are read; see kernel_packed.c."""
    parts = len(old) - 1
    first = np.arange(parts) // SEGMENT * SEGMENT
    last = np.minimum(first + SEGMENT, parts)
    if shift < 0:
        return np.logical_or(new[1:] + shift > old[:-1], new[last] + shift < old[1:])
    return np.logical_or(new[:-1] + shift < old[1:], new[first] + shift > old[:-1])


def _copy_out(
    sources: Sequence[np.ndarray], offsets: np.ndarray, copied: np.ndarray
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Copies of the values of some GRAINs, one behind the other, and where those of each begin, or -1."""
    counts = np.diff(offsets) * copied
    ends = counts.cumsum()
    copies = tuple(np.empty(counts.sum(), source.dtype) for source in sources)
    tasks: list[Callable[[], Any]] = []
    edges = np.flatnonzero(np.diff(copied, prepend=False, append=False)).tolist()
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        for start in range(first, last, SEGMENT):
            stop = min(start + SEGMENT, last)
            place = slice(ends[start] - counts[start], ends[stop - 1])
            own = slice(offsets[start], offsets[stop])
            tasks += [
                partial(np.copyto, copy[place], source[own])
                for copy, source in zip(copies, sources, strict=True)
            ]
    in_parallel(tasks)
    return copies, np.where(copied, ends - counts, -1)
