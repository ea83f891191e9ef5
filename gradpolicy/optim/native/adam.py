"""Masked Adam by the C kernel: jobs written down as kernel.c reads them, and kept for the next step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim.adam import Job, Settings
from gradpolicy.optim.native import moves as native
from gradpolicy.optim.record import GroupNumbers, KeptJob, addresses

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}

_VECTORS = ("parameter", "gradient", "first", "second", "largest")
_POINTERS = (*_VECTORS, "step", "codes", "rows", "bits", "offsets", "corrections", "settings")
_SIZES = ("slots", "size", "block")
_SWITCHES = ("code_bytes", "type", "packed", "step_bytes")
_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "scale")


class _Settings(ctypes.Structure):
    """`settings` of kernel.c."""

    _fields_ = [
        *((name, ctypes.c_double) for name in _NUMBERS),
        *((name, ctypes.c_int32) for name in ("maximize", "decoupled")),
    ]


class _Job(ctypes.Structure):
    """`job` of kernel.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _SWITCHES),
    ]


def takes(job: Job) -> bool:
    """Whether the kernel can do a job."""
    dtype = job.parameter.dtype
    if dtype not in TYPES or not job.parameter.is_cpu or job.gradient.dtype is not dtype:
        return False
    return all(moment.dtype is dtype for moment in job.moments) and native.library() is not None


class Numbers(GroupNumbers):
    """A param group's numbers at one step, as the kernel reads them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        numbers = (getattr(settings, name) for name in _NUMBERS)
        self._record = _Settings(*numbers, settings.maximize, settings.decoupled)
        self.address = ctypes.addressof(self._record)
        self._tables: dict[tuple[Any, ...], tuple[int, int, Any]] = {}

    def table(self, births: tuple[int, ...], clock: int, slots: int, double: bool) -> tuple[int, int, Any]:
        """How many slots the kernel looks up (1: none), and address and memory of their corrections."""
        key = (births, clock, slots, double)
        found = self._tables.get(key)
        if found is None:
            count = max(slots, len(births)) if len(births) > 1 else 1
            found = self._tables[key] = (count, *_table(self.pairs(births, clock), slots, double))
        return found


class Record(KeptJob):
    """A job as the kernel reads it."""

    def __init__(self, job: Job, births: tuple[int, ...]) -> None:
        super().__init__(job, births)
        held, self.slots = job.held, job.slots
        self.double = job.parameter.dtype is torch.float64
        rows = job.rows
        size = job.parameter.numel() if rows is None else rows.numel() * job.block
        entries = held if held is not None and job.block == 1 else None
        self._job = _Job(
            **dict(zip(_VECTORS, addresses(self._vectors), strict=False)),
            codes=job.codes.data_ptr(),
            rows=None if rows is None else rows.data_ptr(),
            bits=entries.bits.data_ptr() if entries and entries.bits is not None else None,
            offsets=entries.offsets.data_ptr() if entries and entries.offsets is not None else None,
            size=size,
            block=job.block,
            code_bytes=job.codes.element_size(),
            type=TYPES[job.parameter.dtype],
            packed=held is not None,
        )
        self.address = ctypes.addressof(self._job)

    def watch(self, parameter: Tensor, gradient: Tensor, state: Sequence[Tensor]) -> bool:
        """Serve at later steps too, and count the step up; False where that cannot be."""
        step = state[-1]
        counts = step.is_cpu and step.numel() == 1 and step.dtype in (torch.float32, torch.float64)
        if not counts or not super().watch(parameter, gradient, state):
            return False
        self.counts_up = True
        self._job.step, self._job.step_bytes = step.data_ptr(), step.element_size()
        return True

    def place(self, parameter: int, gradient: int) -> None:
        """Take the addresses of parameter and gradient."""
        self._job.parameter, self._job.gradient = parameter, gradient

    def correct(self, numbers: Numbers, clock: int, births: tuple[int, ...] | None = None) -> None:
        """Use these settings, and the ages at this clock; with `births`, not the job's but these."""
        job = self._job
        births = self.births if births is None else births
        job.settings = numbers.address
        job.slots, job.corrections, _ = numbers.table(births, clock, self.slots, self.double)


def run(records: Sequence[Record]) -> None:
    """Carry out what records say; the numbers they were given must still be alive."""
    kernel = native.library()
    assert kernel is not None
    count = len(records)
    jobs = (ctypes.c_void_p * count)(*[record.address for record in records])
    first_parts = (ctypes.c_int64 * (count + 1))()
    kernel.gradpolicy_adam(jobs, ctypes.c_int64(count), first_parts, torch.get_num_threads())


def _table(given: Sequence[float], slots: int, double: bool) -> tuple[int, Any]:
    """Address and memory of corrections as pairs."""
    # Slots of frozen codes are looked up too, and thrown away; registers are loaded 8 slots at once.
    pairs = [*given, *[0.0] * (2 * max(slots, 16) - len(given))]
    number = ctypes.c_double if double else ctypes.c_float
    table = (number * len(pairs))(*pairs)
    return ctypes.addressof(table), table
