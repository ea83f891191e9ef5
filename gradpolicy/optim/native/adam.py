"""Masked Adam by the C kernel: jobs written down as kernel.c reads them, and kept for the next step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim.adam import Job
from gradpolicy.optim.native import moves as native
from gradpolicy.optim.record import KeptJob, Numbers, State

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}

_VECTORS = ("parameter", "gradient", "first", "second", "largest")
_POINTERS = (*_VECTORS, "step", "codes", "rows", "bits", "offsets", "corrections", "settings")
_SIZES = ("slots", "size", "block")
_SWITCHES = ("code_bytes", "type", "packed", "step_bytes")
_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "scale")
_FLAGS = ("maximize", "decoupled")


class _Settings(ctypes.Structure):
    """`settings` of kernel.c."""

    _fields_ = [
        *((name, ctypes.c_double) for name in _NUMBERS),
        *((name, ctypes.c_int32) for name in _FLAGS),
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


class Record(KeptJob):
    """A job as the kernel reads it."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        held, self.slots = job.held, job.slots
        self.double = job.parameter.dtype is torch.float64
        rows = job.rows
        size = job.parameter.numel() if rows is None else rows.numel() * job.block
        entries = held if held is not None and job.block == 1 else None
        self._job = _Job(
            **dict(zip(_VECTORS, [*self.places, *self.moments], strict=False)),
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

    def watch(self, parameter: Tensor, gradient: Tensor, moments: Sequence[Tensor], state: State) -> bool:
        """Serve at later steps too, and count the step up; False where that cannot be."""
        step = state["step"]
        counts = step.is_cpu and step.numel() == 1 and step.dtype in (torch.float32, torch.float64)
        if not counts or not super().watch(parameter, gradient, moments, state):
            return False
        self.counts_up = True
        self._job.step, self._job.step_bytes = step.data_ptr(), step.element_size()
        return True

    def place(self, parameter: int, gradient: int) -> None:
        """Write these addresses down."""
        self._job.parameter, self._job.gradient = parameter, gradient

    def use(self, settings: int, corrections: int, slots: int) -> None:
        """Read settings and corrections there, the latter for so many slots (1: one pair for all)."""
        self._job.settings, self._job.corrections, self._job.slots = settings, corrections, slots


class Batch:
    """Jobs for one call of the kernel, again and again.

    Args:
        records: the jobs, each with the place of its numbers.
    """

    def __init__(self, records: Sequence[tuple[Record, int]]) -> None:
        self._settings: dict[int, _Settings] = {}
        self._tables: dict[tuple[int, int, bool], ctypes.Array[Any]] = {}
        self._records = records
        self._jobs = (ctypes.c_void_p * len(records))(*[record.address for record, _ in records])
        self._first_parts = (ctypes.c_int64 * (len(records) + 1))()

    def run(self, numbers: Sequence[Numbers]) -> None:
        """Carry the jobs out with these numbers."""
        if not self._records:
            return
        if not self._settings:
            self._make_room(numbers)
        for place, settings in self._settings.items():
            for name in _NUMBERS + _FLAGS:
                setattr(settings, name, getattr(numbers[place].settings, name))
        for (place, *_), table in self._tables.items():
            pairs = numbers[place].pairs
            table[: len(pairs)] = [*pairs]
        kernel = native.library()
        assert kernel is not None
        kernel.gradpolicy_adam(self._jobs, len(self._records), self._first_parts, torch.get_num_threads())

    def _make_room(self, numbers: Sequence[Numbers]) -> None:
        """Memory for settings and corrections, which jobs with the same numbers share."""
        for record, place in self._records:
            settings = self._settings.setdefault(place, _Settings())
            slots = max(record.slots, count) if (count := len(numbers[place].pairs) // 2) > 1 else 1
            key = (place, slots, record.double)
            if key not in self._tables:
                # Slots of frozen codes are looked up too, and thrown away; registers take 8 slots at once.
                number = ctypes.c_double if record.double else ctypes.c_float
                self._tables[key] = (number * (2 * max(slots, 16)))()
            record.use(ctypes.addressof(settings), ctypes.addressof(self._tables[key]), slots)
