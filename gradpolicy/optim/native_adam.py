"""Masked Adam by the C kernel: jobs written down as kernel.c reads them, and kept for the next step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim import native
from gradpolicy.optim.adam import Job, Settings

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


class Numbers:
    """A param group's numbers at one step, as the kernel reads them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        numbers = (getattr(settings, name) for name in _NUMBERS)
        self._record = _Settings(*numbers, settings.maximize, settings.decoupled)
        self.address = ctypes.addressof(self._record)
        self._tables: dict[tuple[Any, ...], tuple[int, int, Any]] = {}

    def table(self, births: tuple[int, ...], clock: int, slots: int, double: bool) -> tuple[int, int, Any]:
        """How many slots the kernel looks up (1: none), and address and memory of their corrections.

        Tensors that have been masked at the same steps share a table.
        """
        key = (births, clock, slots, double)
        found = self._tables.get(key)
        if found is None:
            ages = tuple(clock - birth for birth in births)
            table = _table(*self.settings.corrections(ages), slots, double)
            found = self._tables[key] = (max(slots, len(ages)) if len(ages) > 1 else 1, *table)
        return found


class Record:
    """A job as the kernel reads it, which serves at later steps as long as all lies as it did.

    Every address is compared or read anew at each step. What belongs to the masks (codes, index, births)
    stays: a change of the mask makes a new record.

    Args:
        job: what to do, one that `takes` accepts.
        births: clock at which each active slot had age 0.
    """

    def __init__(self, job: Job, births: tuple[int, ...]) -> None:
        held = job.held
        self.births, self.slots = births, job.slots
        self.double = job.parameter.dtype is torch.float64
        rows = job.rows
        size = job.parameter.numel() if rows is None else rows.numel() * job.block
        entries = held if held is not None and job.block == 1 else None
        self._vectors = [job.parameter, job.gradient, *job.moments]
        self._of_the_mask = (job.codes, held, rows)
        self._kept: tuple[tuple[Tensor, int], ...] = ()
        self._form: tuple[Any, ...] = ()
        self._job = _Job(
            **dict(zip(_VECTORS, _addresses(self._vectors), strict=False)),
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
        """Serve at later steps too, and count the step up; False where that cannot be.

        Args:
            parameter: what the job updates.
            gradient: its gradient.
            state: its moments and, last, its step count.
        """
        *moments, step = state
        counts = step.is_cpu and step.numel() == 1 and step.dtype in (torch.float32, torch.float64)
        if not counts or _addresses(self._vectors) != _addresses([parameter, gradient, *moments]):
            return False
        self._job.step, self._job.step_bytes = step.data_ptr(), step.element_size()
        self._kept = tuple((each, each.data_ptr()) for each in state)
        self._form = (*_form(parameter), *_form(gradient))
        self._vectors = []
        return True

    def follow(self, parameter: Tensor, gradient: Tensor, state: Sequence[Tensor | None]) -> bool:
        """Whether all lies as when it was watched, except that parameter and gradient may have moved."""
        if len(state) != len(self._kept):
            return False
        for tensor, (last, address) in zip(state, self._kept, strict=True):
            if tensor is not last or last.data_ptr() != address:
                return False
        if (*_form(parameter), *_form(gradient)) != self._form:
            return False
        self._job.parameter, self._job.gradient = parameter.data_ptr(), gradient.data_ptr()
        return True

    def correct(self, numbers: Numbers, clock: int, births: tuple[int, ...] | None = None) -> None:
        """Use these settings, and the ages at this clock; with `births`, not the job's but these."""
        job = self._job
        births = self.births if births is None else births
        job.settings = numbers.address
        job.slots, job.corrections, _ = numbers.table(births, clock, self.slots, self.double)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """What must be the same for an address to mean the same."""
    return type(tensor), tensor.dtype, tensor.is_cpu, tensor.stride(), tensor.numel()


def run(records: Sequence[Record]) -> None:
    """Carry out what records say; the numbers they were given must still be alive."""
    kernel = native.library()
    assert kernel is not None
    count = len(records)
    jobs = (ctypes.c_void_p * count)(*[record.address for record in records])
    first_parts = (ctypes.c_int64 * (count + 1))()
    kernel.gradpolicy_adam(jobs, ctypes.c_int64(count), first_parts, torch.get_num_threads())


def _table(
    step_sizes: tuple[float, ...], roots: tuple[float, ...], slots: int, double: bool
) -> tuple[int, Any]:
    """Address and memory of corrections as pairs."""
    pairs = [part for size, root in zip(step_sizes, roots, strict=True) for part in (size, 1 / root)]
    # Slots of frozen codes are looked up too, and thrown away; registers are loaded 8 slots at once.
    pairs += [0.0] * (2 * max(slots, len(step_sizes), 16) - len(pairs))
    number = ctypes.c_double if double else ctypes.c_float
    table = (number * len(pairs))(*pairs)
    return ctypes.addressof(table), table
