"""The moves that masks need in numba's loops, where the C kernel cannot do them.

What `native.moves` is to kernel.c, this is to loops.py; `adam` runs the updates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradpolicy.machinery.jitting import in_parallel, loops, parts
from gradpolicy.optim.native.moves import GRAIN

PART = 16 * GRAIN
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


def bits(flags: Tensor) -> tuple[Tensor, Tensor] | None:
    """Flags, or codes below 0, as bits, and how many in each GRAIN; None where the loops cannot do it."""
    if flags.element_size() > 1 or not _on_cpu(flags) or library() is None:
        return None
    count, shift = flags.numel(), 0 if flags.dtype is torch.bool else 7
    packed = torch.zeros(-(-count // 8), dtype=torch.uint8, device="cpu")
    counts = torch.zeros(-(-count // GRAIN), dtype=torch.int64, device="cpu")
    _run(library().pack_bits, array(flags, torch.uint8), shift, array(packed), array(counts), size=count)
    return packed, counts


def _copy(values: np.ndarray) -> np.ndarray:
    """A copy in memory that NumPy asks for, in fewer and larger pages than torch's: fresh pages are slow."""
    copy = np.empty_like(values)
    starts = range(0, len(values), PART)
    pairs = [(copy[start : start + PART], values[start : start + PART]) for start in starts]
    in_parallel([partial(np.copyto, *pair) for pair in pairs])
    return copy


def repack(
    old: tuple[Tensor, Tensor] | None,
    new: tuple[Tensor, Tensor] | None,
    values: Tensor,
    result: Tensor,
    size: int,
    newcomer: int = 0,
) -> bool:
    """Move values between sets of held entries, as `native.repack`, to memory of their own.

    Returns:
        False where the loops cannot do it.
    """
    if not _on_cpu(values, result) or library() is None:
        return False
    everything = (np.empty(0, np.uint8), np.empty(0, np.int64))
    index = [everything if each is None else tuple(map(array, each)) for each in (old, new)]
    whole = WHOLE[values.element_size()]
    arrays = [array(tensor, whole) for tensor in (values, result)]
    if values.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
        arrays[0] = _copy(arrays[0])  # parts are written in no order that would leave what others still read
    kind = arrays[0].dtype.type
    first = kind(newcomer % (1 << (8 * values.element_size())))
    _run(library().repack, *index[0], *index[1], *arrays, size, first, size=-(-size // GRAIN), part=16)
    return True
