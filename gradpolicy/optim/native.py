"""The C kernel: compiled once by the system's compiler, kept in a cache folder, called without the GIL.

Here are the moves that masks need; `native_adam` runs the updates.

Where there is no compiler, the loops of `jitted` do it, which is said once.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from gradpolicy.compiling import compiled

GRAIN = 1 << 15


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel; None, and one warning, where it cannot be had."""
    source = Path(__file__).with_name("kernel.c")
    loaded = compiled(source)
    if loaded is not None:
        for name in ("adam", "recode", "clear", "bits"):
            getattr(loaded, f"gradpolicy_{name}").restype = None
        loaded.gradpolicy_count.restype = ctypes.c_int64
    return loaded


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _on_cpu(*tensors: Tensor | None) -> bool:
    return all(t is None or (t.device.type == "cpu" and t.is_contiguous()) for t in tensors)


def recode(codes: Tensor, mask: Tensor, table: Tensor) -> Tensor | None:
    """`cohorts.recode` for bytes, in place; None where the kernel cannot do it."""
    small = codes.dtype is table.dtype is torch.int8 and 1 < codes.numel() == mask.numel()
    kernel = library() if small and _on_cpu(codes, mask) else None
    if kernel is None:
        return None
    width = table.shape[-1]
    by_byte = torch.zeros(2, 2, 128, dtype=torch.int8)
    by_byte[..., :width] = table
    slots = torch.arange(width, dtype=torch.int8)
    stay = torch.equal(table[0, 0], slots) and torch.equal(table[1, 1], slots - 128)
    freeze, thaw = int(table[0, 1, 0]), int(table[1, 0, 0])
    if not (stay and bool((table[0, 1] == freeze).all() and (table[1, 0] == thaw).all())):
        thaw = 0
    pointers = [_pointer(tensor) for tensor in (codes, mask, by_byte)]
    sizes = (ctypes.c_int64(codes.numel()), ctypes.c_int64(width), thaw, freeze, torch.get_num_threads())
    kernel.gradpolicy_recode(*pointers, *sizes)
    return codes


def clear(flat: Tensor, active: Tensor) -> bool:
    """Zero the entries that are not active (flags, or codes); False where the kernel cannot do it."""
    possible = flat.element_size() in (2, 4, 8) and active.element_size() == 1 and _on_cpu(flat, active)
    kernel = library() if possible else None
    if kernel is None:
        return False
    bit = 1 if active.dtype is torch.bool else 0x80
    sizes = (ctypes.c_int64(flat.numel()), flat.element_size(), bit, torch.get_num_threads())
    kernel.gradpolicy_clear(_pointer(flat), _pointer(active), *sizes)
    return True


def count(flags: Tensor) -> int:
    """How many flags are True."""
    kernel = library() if flags.numel() > GRAIN and _on_cpu(flags) else None
    if kernel is None:
        return int(flags.count_nonzero())
    return int(
        kernel.gradpolicy_count(_pointer(flags), ctypes.c_int64(flags.numel()), torch.get_num_threads())
    )


def bits(flags: Tensor) -> tuple[Tensor, Tensor] | None:
    """Flags, or codes below 0, as bits, and how many in each GRAIN; None where the kernel cannot do it."""
    kernel = library() if flags.element_size() == 1 and _on_cpu(flags) else None
    if kernel is None:
        return None
    count = flags.numel()
    packed = torch.empty(-(-count // 8), dtype=torch.uint8)
    counts = torch.empty(-(-count // GRAIN), dtype=torch.int64)
    pointers = [_pointer(tensor) for tensor in (flags, packed, counts)]
    shift = 0 if flags.dtype is torch.bool else 7
    kernel.gradpolicy_bits(*pointers, ctypes.c_int64(count), shift, torch.get_num_threads())
    return packed, counts


def repack(
    old: tuple[Tensor, Tensor] | None,
    new: tuple[Tensor, Tensor] | None,
    values: Tensor,
    result: Tensor,
    size: int,
    newcomer: int = 0,
) -> bool:
    """Move values between sets of held entries; False where the kernel cannot do it.

    Args:
        old: bits and offsets of the entries in `values`; None: all.
        new: bits and offsets of the entries in `result`; None: all.
        values: what is held now.
        result: filled; it may share its beginning with `values` where `old` and `new` are given.
        size: entries of the whole tensor.
        newcomer: for entries that `values` lacks; 0 where these are no codes.
    """
    kernel = library() if _on_cpu(values, result) and values.element_size() in (1, 2, 4, 8) else None
    if kernel is None:
        return False
    tensors = [*(old or (None, None)), *(new or (None, None)), values, result]
    sizes = (ctypes.c_int64(size), values.element_size(), newcomer, torch.get_num_threads())
    return bool(kernel.gradpolicy_repack(*(_pointer(tensor) for tensor in tensors), *sizes))
