"""Masked Adam on a GPU: jobs written down as the Triton kernels read them, many to a launch."""

from __future__ import annotations

import functools
import itertools
import struct
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.machinery import launching
from gradpolicy.optim.adam import Job, compute_dtype
from gradpolicy.optim.gpu import moves as gpu_moves
from gradpolicy.optim.record import KeptJob, Numbers, State

TYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
SPARSE = 0.15
"""Below this share of active entries it is less memory to read them one by one than to read all."""
WARPS = 8
"""Four entries a thread: as many float32 as one instruction reads."""
_OTHERS, _STEP = slice(2, 6), 8
"""Where addresses of moments and codes, and of the step count, stand in ADDRESSES."""


def takes(job: Job) -> bool:
    """Whether the kernels can do a job."""
    dtype, vectors = job.parameter.dtype, [job.parameter, job.gradient, *job.moments]
    same = dtype in TYPES and all(vector.dtype is dtype for vector in vectors)
    return same and launching.serve(*vectors, job.codes)


class Record(KeptJob):
    """A job as the kernels read it.

    Attributes:
        device: where it runs.
        dtype: what it computes in.
        tiles: how many programs it needs.
        addresses: ADDRESSES of the kernels, less the places of numbers and corrections.
        aligned: whether all begins where memory is read in large pieces.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.device, self.dtype = job.parameter.device, compute_dtype(job.parameter.dtype)
        packed, entries = job.held is not None, job.block == 1
        columns = 0 if entries else min(gpu_moves.tile(), gpu_moves.power_of_two(job.block))
        sparse = entries and not packed and job.density < SPARSE
        self._form = (job.parameter.dtype, job.codes.dtype, self.amsgrad, packed, sparse, columns)
        self.tiles = _tiles(job, columns)
        self.addresses = _addresses(job, self.places, self.moments)
        # Of held entries, single ones are read.
        own = functools.reduce(int.__or__, self.addresses[_OTHERS])
        whole_rows = entries or job.block % gpu_moves.ALIGNMENT == 0
        self._own_aligned = not (entries and packed) and own % gpu_moves.ALIGNMENT == 0 and whole_rows
        self.place(*self.places)

    def watch(self, parameter: Tensor, gradient: Tensor, moments: Sequence[Tensor], state: State) -> bool:
        """Serve at later steps too; False where that cannot be."""
        step = state["step"]
        if step.device == self.device and step.numel() == 1 and step.dtype is torch.float32:
            self.counts_up = True
            self.addresses[_STEP] = step.data_ptr()
        return super().watch(parameter, gradient, moments, state)

    def place(self, parameter: int, gradient: int) -> None:
        """Write these addresses down."""
        self.addresses[:2] = parameter, gradient
        self.aligned = self._own_aligned and (parameter | gradient) % gpu_moves.ALIGNMENT == 0

    def kind(self, many: bool, shared: bool = False) -> Any:
        """What code it needs; see `kernels.Kind`."""
        return _kind(*self._form, self.aligned, self.coupled, many, shared)


@functools.cache
def _kind(
    stored: torch.dtype,
    code: torch.dtype,
    amsgrad: bool,
    packed: bool,
    sparse: bool,
    columns: int,
    aligned: bool,
    coupled: bool,
    many: bool,
    shared: bool,
) -> Any:
    module = gpu_moves.source()
    types = {"stored": _type(module, stored), "code": _type(module, code)}
    switches = {"aligned": aligned, "amsgrad": amsgrad, "coupled": coupled, "many": many, "shared": shared}
    return module.Kind(**types, **switches, packed=packed, sparse=sparse, columns=columns)


def _type(module: Any, dtype: torch.dtype) -> Any:
    return getattr(module.tl, str(dtype).removeprefix("torch."))


def _numbers(numbers: Numbers) -> tuple[float, ...]:
    """NUMBERS of the kernels."""
    settings = numbers.settings
    return (
        (-1.0 if settings.maximize else 1.0) / settings.scale,
        settings.weight_decay if settings.coupled else 0.0,
        1 - settings.lr * settings.weight_decay if settings.decoupled else 1.0,
        1 - settings.beta1,
        settings.beta2,
        1 - settings.beta2,
        settings.eps,
        *numbers.pairs[:2],
    )


def _tiles(job: Job, columns: int) -> int:
    """Programs that a job needs."""
    tile = gpu_moves.tile()
    if job.rows is None:
        return -(-job.parameter.numel() // tile)
    return -(-job.rows.numel() // (tile // columns)) * -(-job.block // columns)


def _addresses(job: Job, places: tuple[int, int], moments: list[int]) -> list[int]:
    """ADDRESSES of the kernels, less the places of numbers and corrections."""
    index, offsets, size = 0, 0, job.parameter.numel()
    if job.rows is not None:
        index, size = job.rows.data_ptr(), job.rows.numel()
    elif job.held is not None:
        assert job.held.bits is not None
        assert job.held.offsets is not None
        index, offsets = job.held.bits.data_ptr(), job.held.offsets.data_ptr()
    vectors = [*places, *moments, *[0] * (3 - len(moments))]
    return [*vectors, job.codes.data_ptr(), index, offsets, 0, size, job.block]


class Batch:
    """Jobs for a launch of each kernel that they need, again and again.

    Args:
        records: the jobs, each with the place of its numbers.
    """

    def __init__(self, records: Sequence[tuple[Record, int]]) -> None:
        self._records = records
        self._on_cuda = any(record.device.type == "cuda" for record, _ in records)
        self._places: list[tuple[int, int]] = []
        self._aligned: list[bool] = []
        self._launches: list[tuple[_Launch, list[int]]] = []

    def run(self, numbers: Sequence[Numbers]) -> list[int]:
        """Carry the jobs out with these numbers.

        Returns:
            Which of them the device's compiler failed for, and are untouched.

        Raises:
            PolicyError: a CUDA graph is being recorded.
        """
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            raise PolicyError(
                "a masked step cannot be recorded in a CUDA graph: ages grow from step to step; "
                "record forward and backward, and step outside of the graph"
            )
        places = [record.places for record, _ in self._records]
        if places != self._places:
            self._follow(numbers)
            self._places = places
        failed: list[int] = []
        for launch, indices in self._launches:
            if not launch.run(numbers):
                failed += indices
        return failed

    def _follow(self, numbers: Sequence[Numbers]) -> None:
        """Have kernels find what has moved."""
        aligned = [record.aligned for record, _ in self._records]
        if aligned != self._aligned:
            self._sort(numbers)
            self._aligned = aligned
        for launch, _ in self._launches:
            launch.write_down()

    def _sort(self, numbers: Sequence[Numbers]) -> None:
        """Put jobs that need the same code together."""
        together: defaultdict[tuple[torch.device, Any], list[int]] = defaultdict(list)
        for index, (record, place) in enumerate(self._records):
            together[record.device, record.kind(len(numbers[place].pairs) > 2)].append(index)
        self._launches = [
            (_Launch([self._records[index] for index in indices], numbers), indices)
            for indices in together.values()
        ]


class _Launch:
    """Jobs that need the same code, as the kernel reads them; what stays is on the device already."""

    def __init__(self, records: Sequence[tuple[Record, int]], numbers: Sequence[Numbers]) -> None:
        first = records[0][0]
        self._device, self._double = first.device, first.dtype is torch.float64
        self._places = list(dict.fromkeys(place for _, place in records))
        self._many = len(numbers[self._places[0]].pairs) > 2
        # Arguments of a kernel have single precision.
        self._shared = len(self._places) == 1 and not self._double
        kind = first.kind(self._many, self._shared)
        room = gpu_moves.power_of_two(len(records))
        starts = [0, *itertools.accumulate(record.tiles for record, _ in records)]
        self._programs = starts.pop()
        self._starts = starts + [gpu_moves.NO_PROGRAM] * (room - len(records))
        lengths = itertools.accumulate((len(numbers[place].pairs) for place in self._places), initial=0)
        own = dict(zip(self._places, enumerate(lengths), strict=False))
        self._records = [(record, own[place]) for record, place in records]
        source = gpu_moves.source()
        kernel = source.adam_rows if kind.columns else source.adam_entries
        self._launch = launching.launcher(kernel, self._device, WARPS, KIND=kind, JOBS=room)

    def write_down(self) -> None:
        """Have the device told of where all lies."""
        wholes = array("q", self._starts)
        for record, own in self._records:
            wholes.extend(record.addresses)
            wholes.extend(own)
        self._table = launching.Resident(torch.frombuffer(wholes, dtype=torch.int64), self._device)

    def run(self, numbers: Sequence[Numbers]) -> bool:
        """Update the tensors; False where the device's compiler failed."""
        own, table = [numbers[place] for place in self._places], self._table.here()
        moving, at = (table, 0) if self._shared and not self._many else self._upload(own)
        return self._launch(self._programs, table, moving, at, *_numbers(own[0]))

    def _upload(self, own: Sequence[Numbers]) -> tuple[Tensor, int]:
        """What is new at each step, and where corrections begin in it."""
        shared = [] if self._shared else [part for each in own for part in _numbers(each)]
        corrections = [part for each in own for part in each.pairs] if self._many else []
        form = f"{len(shared)}d{len(corrections)}{'d' if self._double else 'f'}"
        written = bytearray(struct.pack(form, *shared, *corrections))
        return launching.upload(torch.frombuffer(written, dtype=torch.uint8), self._device), len(shared)
