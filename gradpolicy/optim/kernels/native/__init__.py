"""Kernels in C, for CPUs: jobs are packed into bytes as the C reads them."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradpolicy.compiling import compiled, rule_defines
from gradpolicy.optim.kernels.reference import EntryUpdate, Kernels
from gradpolicy.optim.update_rules import UpdateRule
from gradpolicy.tensors.packed_mask import as_bits

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
STATES, MAX_SETTINGS = 3, 16
_UPDATE_JOB = struct.Struct("9P3q4i")  # update_job of update.c
_BLOCK_JOB = struct.Struct("6P3q4i")  # block_job of blocks.c
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FOLDER = Path(__file__).parent
_forked = False
"""True in a forked process, which does not inherit OpenMP's threads and would wait for them forever."""


class Native(Kernels):
    """The same operations in C."""

    def update(
        self, rule: UpdateRule, settings: tuple[float, ...], numbers: Tensor, updates: Sequence[EntryUpdate]
    ) -> None:
        """See `Kernels.update`."""
        constants = (ctypes.c_double * MAX_SETTINGS)(*settings)
        shared = (numbers.data_ptr(), ctypes.addressof(constants))
        names = (*rule.names, *("",) * STATES)[:STATES]
        # C reads these, so they must live until it returns.
        bits = [
            None if each.index is None else as_bits(each.index, each.parameter.numel() // each.block)
            for each in updates
        ]
        jobs = [
            _UPDATE_JOB.pack(
                each.parameter.data_ptr(),
                each.gradient.data_ptr(),
                *[each.state[name].data_ptr() if name in each.state else 0 for name in names],
                each.ages.data_ptr(),
                0 if index is None else index.data_ptr(),
                *shared,
                each.uncounted if each.age is None else each.age,
                each.parameter.numel() // each.block,
                each.block,
                each.ages.element_size(),
                TYPES[each.parameter.dtype],
                each.age is not None,
                each.gradient_packed,
            )
            for each, index in zip(updates, bits, strict=True)
        ]
        _call(_function(f"update_{rule.kernel}", rule.kernel), b"".join(jobs), len(jobs))

    def turn(self, ages: Tensor, uncounted: int, flags: Tensor, forget: bool) -> None:
        """See `Kernels.turn`."""
        job = _block_job(ages=ages, flags=flags, blocks=ages.numel(), forget=forget, updates=uncounted)
        _call(_function("turn"), job)

    def fill_frozen(
        self, values: Tensor, ages: Tensor | None, index: Tensor | None, block: int, fill: float | Tensor
    ) -> None:
        """See `Kernels.fill_frozen`."""
        blocks = values.numel() // block
        index = None if index is None else as_bits(index, blocks)
        _call(
            _function("fill_frozen"),
            _block_job(values, ages=ages, index=index, blocks=blocks, block=block, fill=fill),
        )

    def repack(
        self,
        values: Tensor,
        source: Tensor | None,
        target: Tensor | None,
        block: int,
        blocks: int,
        fill: float,
    ) -> Tensor:
        """See `Kernels.repack`."""
        count = _function("count_blocks")
        source, target = (None if index is None else as_bits(index, blocks) for index in (source, target))
        read = blocks if source is None else count(source.data_ptr(), source.numel() * 8)
        written = blocks if target is None else count(target.data_ptr(), target.numel() * 8)
        # Otherwise C would read and write out of bounds.
        assert values.numel() == read * block, "values must be those of the index that they follow"
        repacked = values.new_empty(written * block)
        _function("ask_for_large_pages")(repacked.data_ptr(), repacked.nbytes)
        job = _block_job(values, repacked, index=source, target=target, blocks=blocks, block=block, fill=fill)
        _call(_function("repack"), job)
        return repacked


NATIVE = Native()


def supports(dtypes: Sequence[torch.dtype], rule_kernel: str | None) -> bool:
    """Return True if the C code compiles and supports the dtypes and the rule; an update has one dtype."""
    if rule_kernel is None:
        return all(dtype.itemsize in _WHOLE for dtype in dtypes) and _library() is not None
    known = bool(rule_kernel) and dtypes[0] in TYPES and len(set(dtypes)) == 1
    return known and _library() is not None and _update_library(rule_kernel) is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    return compiled(_FOLDER / "blocks.c")


@functools.cache
def _update_library(rule_kernel: str) -> ctypes.CDLL | None:
    return compiled(_FOLDER / "update.c", **rule_defines(rule_kernel))


@functools.cache
def _function(name: str, rule_kernel: str = "") -> Callable[..., Any]:
    """Return a C function: one that takes jobs, or one that takes an address and a number."""
    library = _update_library(rule_kernel) if rule_kernel else _library()
    function = getattr(library, name)
    takes_jobs = name not in ("count_blocks", "ask_for_large_pages")
    function.argtypes = (
        (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int) if takes_jobs else (ctypes.c_void_p, ctypes.c_int64)
    )
    function.restype = ctypes.c_int64 if name == "count_blocks" else None
    return function


def _call(function: Callable[..., Any], jobs: bytes, count: int = 1) -> None:
    function(jobs, count, 1 if _forked else torch.get_num_threads())


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def _block_job(
    values: Tensor | None = None,
    packed: Tensor | None = None,
    *,
    ages: Tensor | None = None,
    index: Tensor | None = None,
    target: Tensor | None = None,
    flags: Tensor | None = None,
    blocks: int,
    block: int = 1,
    fill: float | Tensor = 0,
    forget: bool = False,
    updates: int = 0,
) -> bytes:
    if isinstance(fill, Tensor):
        packed, fill = fill, 0
    return _BLOCK_JOB.pack(
        *map(_address, (values, packed, ages, index, target, flags)),
        0 if values is None else _bits_of(float(fill), values.dtype),
        blocks,
        block,
        0 if ages is None else ages.element_size(),
        0 if values is None else values.element_size(),
        forget,
        updates,
    )


def _address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "C reads memory in order"
    return tensor.data_ptr()


@functools.lru_cache
def _bits_of(number: float, dtype: torch.dtype) -> int:
    """Return the bits of a number in a dtype, as a whole number."""
    return int(torch.tensor([number], dtype=dtype, device="cpu").view(_WHOLE[dtype.itemsize]))
