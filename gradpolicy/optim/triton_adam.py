"""Masked Adam on a GPU: jobs written down as the Triton kernels read them, many to a launch."""

from __future__ import annotations

import functools
import itertools
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from gradpolicy.errors import PolicyError
from gradpolicy.optim import triton_moves
from gradpolicy.optim.adam import Job, Settings, compute_dtype

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
    return same and triton_moves.serves(*vectors, job.codes)


def run(jobs: Sequence[Job]) -> list[Job]:
    """Carry out jobs that `takes` accepts.

    Returns:
        Those that the device's compiler failed for, untouched.

    Raises:
        PolicyError: a CUDA graph is being recorded.
    """
    batches: defaultdict[tuple[torch.device, Any], list[Job]] = defaultdict(list)
    for job in jobs:
        batches[job.parameter.device, _kind(job)].append(job)
    if any(device.type == "cuda" for device, _ in batches) and torch.cuda.is_current_stream_capturing():
        raise PolicyError(
            "a masked step cannot be recorded in a CUDA graph: ages grow from step to step; "
            "record forward and backward, and step outside of the graph"
        )
    return [job for key, batch in batches.items() if not _launch(*key, batch) for job in batch]


def _kind(job: Job) -> Any:
    """What code the job needs."""
    module = triton_moves.kernels()
    assert module is not None
    packed, entries = job.held is not None, job.block == 1
    sparse = entries and not packed and job.density < SPARSE
    vectors = [job.parameter, job.gradient, *job.moments, job.codes]
    beginnings = functools.reduce(int.__or__, (vector.data_ptr() for vector in vectors))
    return module.Kind(
        stored=_type(module, job.parameter.dtype),
        code=_type(module, job.codes.dtype),
        aligned=not (entries and packed) and _aligned(beginnings, job.block),
        amsgrad=len(job.moments) > 2,
        coupled=bool(job.settings.weight_decay) and not job.settings.decoupled,
        many=len(job.ages) > 1,
        packed=packed,
        sparse=sparse,
        columns=0 if entries else min(int(module.TILE.value), _power_of_two(job.block)),
    )


def _aligned(beginnings: int, block: int) -> bool:
    return beginnings % ALIGNMENT == 0 and (block == 1 or block % ALIGNMENT == 0)


def _type(module: Any, dtype: torch.dtype) -> Any:
    return getattr(module.tl, str(dtype).removeprefix("torch."))


def _power_of_two(count: int) -> int:
    """The next one, `count` itself where it is one."""
    return 1 << max(count - 1, 0).bit_length()


def _launch(device: torch.device, kind: Any, jobs: Sequence[Job]) -> bool:
    """Update tensors that need the same code."""
    starts = [0, *itertools.accumulate(_tiles(job, kind) for job in jobs)]
    room = _power_of_two(len(jobs))
    starts, programs = starts[:-1] + [NO_PROGRAM] * (room - len(jobs)), starts[-1]
    addresses: list[int] = []
    numbers: list[float] = []
    corrections: list[float] = []
    for job in jobs:
        addresses += _addresses(job, len(corrections))
        numbers += _numbers(job)
        if kind.many:
            corrections += [
                part for size, root in zip(*job.corrections, strict=True) for part in (size, 1 / root)
            ]
    dtype = compute_dtype(jobs[0].parameter.dtype)
    number = "d" if dtype is torch.float64 else "f"
    wholes = len(starts) + len(addresses)
    form = f"{wholes}q{len(numbers)}d{len(corrections)}{number}"
    written = struct.pack(form, *starts, *addresses, *numbers, *corrections)
    table = triton_moves.upload(torch.frombuffer(bytearray(written), dtype=torch.uint8), device)
    ends = [0, 8 * room, 8 * wholes, 8 * (wholes + len(numbers)), len(written)]
    parts = [table[start:end] for start, end in itertools.pairwise(ends)]
    typed = [
        part.view(dtype)
        for part, dtype in zip(parts, (torch.int64, torch.int64, torch.float64, dtype), strict=True)
    ]
    name = "adam_rows" if kind.columns else "adam_entries"
    done = triton_moves.launch(name, programs, device, *typed, KIND=kind, JOBS=room, num_warps=WARPS)
    if done:
        # Autograd must see that what it may have saved is no longer there.
        torch.autograd.graph.increment_version([job.parameter for job in jobs])
    return done


def _tiles(job: Job, kind: Any) -> int:
    """Programs that a job needs."""
    tile = triton_moves.tile()
    if not kind.columns:
        return -(-job.parameter.numel() // tile)
    assert job.rows is not None
    return -(-job.rows.numel() // (tile // kind.columns)) * -(-job.block // kind.columns)


def _addresses(job: Job, corrections: int) -> list[int]:
    """ADDRESSES of the kernels."""
    index, offsets, size = 0, 0, job.parameter.numel()
    if job.rows is not None:
        index, size = job.rows.data_ptr(), job.rows.numel()
    elif job.held is not None:
        assert job.held.bits is not None
        assert job.held.offsets is not None
        index, offsets = job.held.bits.data_ptr(), job.held.offsets.data_ptr()
    moments = [moment.data_ptr() for moment in job.moments]
    vectors = [job.parameter.data_ptr(), job.gradient.data_ptr(), *moments, *[0] * (3 - len(moments))]
    return [*vectors, job.codes.data_ptr(), index, offsets, size, job.block, corrections]


def _numbers(job: Job) -> list[float]:
    """NUMBERS of the kernels."""
    (step_size, *_), (root, *_) = job.corrections
    return [*_constants(job.settings), step_size, 1 / root]


@functools.lru_cache(maxsize=64)
def _constants(settings: Settings) -> tuple[float, ...]:
    sign = -1.0 if settings.maximize else 1.0
    return (
        sign / settings.scale,
        settings.weight_decay,
        1 - settings.lr * settings.weight_decay if settings.decoupled else 1.0,
        1 - settings.beta1,
        settings.beta2,
        1 - settings.beta2,
        settings.eps,
    )
