"""Masked Adam by the C kernel: jobs written down as kernel.c reads them."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from gradpolicy.optim import native
from gradpolicy.optim.adam import Job

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}

_POINTERS = (
    *("parameter", "gradient", "first", "second", "largest"),
    *("codes", "rows", "bits", "offsets", "corrections"),
)
_SIZES = ("slots", "size", "block")
_SWITCHES = ("code_bytes", "type", "packed", "maximize", "decoupled", "unused")
_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "scale")


class _Job(ctypes.Structure):
    """`job` of kernel.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _SWITCHES),
        *((name, ctypes.c_double) for name in _NUMBERS),
    ]


def takes(job: Job) -> bool:
    """Whether the kernel can do a job."""
    dtype = job.parameter.dtype
    if dtype not in TYPES or not job.parameter.is_cpu or job.gradient.dtype is not dtype:
        return False
    return all(moment.dtype is dtype for moment in job.moments) and native.library() is not None


def run(jobs: Sequence[Job]) -> None:
    """Carry out jobs that `takes` accepts."""
    kernel = native.library()
    assert kernel is not None
    alive: list[Any] = []
    records = (_Job * len(jobs))(*(_record(job, alive) for job in jobs))
    parts = [0, *itertools.accumulate(-(-record.size // native.GRAIN) for record in records)]
    first_parts = (ctypes.c_int64 * len(parts))(*parts)
    kernel.gradpolicy_adam(records, ctypes.c_int64(len(jobs)), first_parts, torch.get_num_threads())


def _record(job: Job, alive: list[Any]) -> _Job:
    """A job as the kernel reads it; what is made for it is put in `alive`."""
    settings, held, moments = job.settings, job.held, job.moments
    double = job.parameter.dtype is torch.float64
    slots, table = _table(*job.corrections, job.slots, double)
    rows, size = None, job.parameter.numel()
    if job.block > 1:
        rows = job.rows
        assert rows is not None
        size = rows.numel() * job.block
    alive += [rows, table]
    entries = held if held is not None and job.block == 1 else None
    return _Job(
        job.parameter.data_ptr(),
        job.gradient.data_ptr(),
        moments[0].data_ptr(),
        moments[1].data_ptr(),
        moments[2].data_ptr() if len(moments) > 2 else None,
        job.codes.data_ptr(),
        None if rows is None else rows.data_ptr(),
        entries.bits.data_ptr() if entries and entries.bits is not None else None,
        entries.offsets.data_ptr() if entries and entries.offsets is not None else None,
        ctypes.addressof(table),
        *(slots, size, job.block),
        *(job.codes.element_size(), TYPES[job.parameter.dtype], held is not None),
        *(settings.maximize, settings.decoupled, 0),
        *(settings.lr, settings.beta1, settings.beta2, settings.eps, settings.weight_decay, settings.scale),
    )


@functools.lru_cache(maxsize=64)
def _table(
    step_sizes: tuple[float, ...], roots: tuple[float, ...], slots: int, double: bool
) -> tuple[int, Any]:
    """How many slots the kernel looks up (1: none), and their corrections as pairs."""
    pairs = [part for size, root in zip(step_sizes, roots, strict=True) for part in (size, 1 / root)]
    # Slots of frozen codes are looked up too, and thrown away; registers are loaded 8 slots at once.
    slots = 1 if len(step_sizes) == 1 else max(len(step_sizes), slots)
    pairs += [0.0] * (2 * max(slots, 16) - len(pairs))
    number = ctypes.c_double if double else ctypes.c_float
    return slots, (number * len(pairs))(*pairs)
