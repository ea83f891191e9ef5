"""Masked Adam on a GPU: jobs written down as the Triton kernels read them, many to a launch."""

from __future__ import annotations

import functools
import itertools
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.machinery import launching
from gradpolicy.optim.adam import Job, Settings, compute_dtype
from gradpolicy.optim.gpu import moves as gpu_moves
from gradpolicy.optim.record import GroupNumbers, KeptJob

TYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
SPARSE = 0.15
"""Below this share of active entries it is less memory to read them one by one than to read all."""
ALIGNMENT = 16
"""Bytes that one instruction reads at most, and so where it must begin."""
WARPS = 8
"""Four entries a thread: as many float32 as one instruction reads."""
NO_PROGRAM = (1 << 63) - 1


def takes(job: Job) -> bool:
    """Whether the kernels can do a job."""
    dtype, vectors = job.parameter.dtype, [job.parameter, job.gradient, *job.moments]
    same = dtype in TYPES and all(vector.dtype is dtype for vector in vectors)
    return same and launching.serve(*vectors, job.codes)


class Record(KeptJob):
    """A job as the kernels read it.

    Attributes:
        device: where it runs.
        tiles: how many programs it needs.
        addresses: ADDRESSES of the kernels.
        kind: what code it needs.
        constants: the first of NUMBERS.
        pairs: corrections of each slot.
    """

    def __init__(self, job: Job, births: tuple[int, ...]) -> None:
        super().__init__(job, births)
        self.device, self.dtype = job.parameter.device, compute_dtype(job.parameter.dtype)
        packed, entries = job.held is not None, job.block == 1
        self._form_of_code = (
            job.parameter.dtype,
            job.codes.dtype,
            len(job.moments) > 2,
            packed,
            entries and not packed and job.density < SPARSE,
            0 if entries else min(gpu_moves.tile(), _power_of_two(job.block)),
        )
        self.tiles = _tiles(job, self._form_of_code[-1])
        self.addresses = _addresses(job)
        # Of held entries, single ones are read.
        own = functools.reduce(int.__or__, self.addresses[2:6])
        whole_rows = entries or job.block % ALIGNMENT == 0
        self._own_aligned = not (entries and packed) and own % ALIGNMENT == 0 and whole_rows
        self.place(*self.addresses[:2])

    def place(self, parameter: int, gradient: int) -> None:
        """Take the addresses of parameter and gradient."""
        self.addresses[:2] = parameter, gradient
        self._aligned = self._own_aligned and (parameter | gradient) % ALIGNMENT == 0

    def correct(self, numbers: GroupNumbers, clock: int, births: tuple[int, ...] | None = None) -> None:
        """Use these numbers, and the ages at this clock; with `births`, not the job's but these."""
        self.pairs = numbers.pairs(self.births if births is None else births, clock)
        self.constants = numbers.constants = numbers.constants or _constants(numbers.settings)
        coupled = self.constants[1] != 0
        self.kind = _kind(*self._form_of_code, self._aligned, coupled, len(self.pairs) > 2)


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
) -> Any:
    module = gpu_moves.source()
    types = {"stored": _type(module, stored), "code": _type(module, code)}
    switches = {"aligned": aligned, "amsgrad": amsgrad, "coupled": coupled, "many": many}
    return module.Kind(**types, **switches, packed=packed, sparse=sparse, columns=columns)


def _type(module: Any, dtype: torch.dtype) -> Any:
    return getattr(module.tl, str(dtype).removeprefix("torch."))


def _constants(settings: Settings) -> tuple[float, ...]:
    """All of NUMBERS but the corrections."""
    sign = -1.0 if settings.maximize else 1.0
    return (
        sign / settings.scale,
        0.0 if settings.decoupled else settings.weight_decay,
        1 - settings.lr * settings.weight_decay if settings.decoupled else 1.0,
        1 - settings.beta1,
        settings.beta2,
        1 - settings.beta2,
        settings.eps,
    )


def _power_of_two(count: int) -> int:
    """The next one, `count` itself where it is one."""
    return 1 << max(count - 1, 0).bit_length()


def _tiles(job: Job, columns: int) -> int:
    """Programs that a job needs."""
    tile = gpu_moves.tile()
    if job.rows is None:
        return -(-job.parameter.numel() // tile)
    return -(-job.rows.numel() // (tile // columns)) * -(-job.block // columns)


def _addresses(job: Job) -> list[int]:
    """ADDRESSES of the kernels; the last one, where the corrections begin, is filled in later."""
    index, offsets, size = 0, 0, job.parameter.numel()
    if job.rows is not None:
        index, size = job.rows.data_ptr(), job.rows.numel()
    elif job.held is not None:
        assert job.held.bits is not None
        assert job.held.offsets is not None
        index, offsets = job.held.bits.data_ptr(), job.held.offsets.data_ptr()
    moments = [moment.data_ptr() for moment in job.moments]
    vectors = [job.parameter.data_ptr(), job.gradient.data_ptr(), *moments, *[0] * (3 - len(moments))]
    return [*vectors, job.codes.data_ptr(), index, offsets, size, job.block, 0]


def run(records: Sequence[Record]) -> list[int]:
    """Carry out what records say.

    Returns:
        Which of them the device's compiler failed for, and are untouched.

    Raises:
        PolicyError: a CUDA graph is being recorded.
    """
    batches: defaultdict[tuple[torch.device, Any], list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        batches[record.device, record.kind].append(index)
    if any(device.type == "cuda" for device, _ in batches) and torch.cuda.is_current_stream_capturing():
        raise PolicyError(
            "a masked step cannot be recorded in a CUDA graph: ages grow from step to step; "
            "record forward and backward, and step outside of the graph"
        )
    failed: list[int] = []
    for (device, kind), indices in batches.items():
        if not _launch(device, kind, [records[index] for index in indices]):
            failed += indices
    return failed


def _launch(device: torch.device, kind: Any, records: Sequence[Record]) -> bool:
    """Update tensors that need the same code."""
    room = _power_of_two(len(records))
    starts = [0, *itertools.accumulate(record.tiles for record in records)]
    programs = starts.pop()
    starts += [NO_PROGRAM] * (room - len(records))
    table, *places = _upload(device, kind, starts, records)
    source = gpu_moves.source()
    kernel = source.adam_rows if kind.columns else source.adam_entries
    return launching.launch(kernel, programs, device, table, *places, KIND=kind, JOBS=room, num_warps=WARPS)


def _upload(
    device: torch.device, kind: Any, starts: list[int], records: Sequence[Record]
) -> tuple[Tensor, int, int]:
    """All that the kernels read of jobs, in one copy, and where numbers and corrections begin in it."""
    wholes = list(starts)
    numbers: list[float] = []
    corrections: list[float] = []
    places: dict[int, int] = {}
    for record in records:
        pairs = record.pairs
        if kind.many:
            # Tensors that have been masked at the same steps share a table.
            place = places.setdefault(id(pairs), len(corrections))
            if place == len(corrections):
                corrections += pairs
            record.addresses[-1] = place
        wholes += record.addresses
        numbers += record.constants
        numbers += pairs[:2]
    number = "d" if records[0].dtype is torch.float64 else "f"
    form = f"{len(wholes)}q{len(numbers)}d{len(corrections)}{number}"
    written = bytearray(struct.pack(form, *wholes, *numbers, *corrections))
    table = launching.upload(torch.frombuffer(written, dtype=torch.int64), device)
    return table, len(wholes), len(wholes) + len(numbers)
