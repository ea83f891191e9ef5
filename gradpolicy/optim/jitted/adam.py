"""Masked Adam by numba's loops: what loops.py reads, made of jobs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gradpolicy.machinery.jitting import in_parallel, parts
from gradpolicy.optim.adam import Job, Settings, compute_dtype
from gradpolicy.optim.jitted import moves as jitted
from gradpolicy.optim.jitted.moves import PART, array


def takes(job: Job) -> bool:
    """Whether the loops can do a job."""
    dtype = job.parameter.dtype
    if not dtype.is_floating_point or not job.parameter.is_cpu or job.gradient.dtype is not dtype:
        return False
    return all(moment.dtype is dtype for moment in job.moments) and jitted.library() is not None


def run(jobs: Sequence[Job]) -> None:
    """Carry out jobs that `takes` accepts."""
    in_parallel([task for job in jobs for task in _tasks(job)])


def _tasks(job: Job) -> Iterator[Callable[[], Any]]:
    kernel, held = jitted.library(), job.held
    dtype = np.dtype(str(compute_dtype(job.parameter.dtype)).removeprefix("torch."))
    common = (
        array(job.parameter),
        array(job.gradient),
        tuple(array(moment) for moment in job.moments),
        array(job.codes),
        _table(*job.corrections, job.slots, dtype),
        _numbers(job.settings, dtype),
    )
    if job.block > 1:
        assert job.rows is not None
        arguments = (*common, array(job.rows), job.block, held is not None)
        return parts(kernel.adam_rows, *arguments, size=job.rows.numel(), part=max(1, PART // job.block))
    if held is None:
        return parts(kernel.adam, *common, size=job.parameter.numel(), part=PART)
    assert held.bits is not None
    assert held.offsets is not None
    index = (array(held.bits), array(held.offsets))
    return parts(kernel.adam_held, *common, *index, size=held.size, part=PART)


@functools.lru_cache(maxsize=64)
def _table(
    step_sizes: tuple[float, ...], roots: tuple[float, ...], slots: int, dtype: np.dtype
) -> np.ndarray:
    """Step size and inverse root of each slot; slots of frozen codes are looked up too, and thrown away."""
    table = np.zeros((1 if len(step_sizes) == 1 else max(slots, len(step_sizes)), 2), dtype)
    table[: len(step_sizes)] = [(size, 1 / root) for size, root in zip(step_sizes, roots, strict=True)]
    return table


@functools.lru_cache(maxsize=64)
def _numbers(settings: Settings, dtype: np.dtype) -> np.ndarray:
    """What all entries share, as `loops.adam` reads it."""
    decay, decoupled = settings.weight_decay, settings.decoupled
    numbers = (
        *(1 - settings.beta1, settings.beta2, 1 - settings.beta2, settings.eps),
        *(1 - settings.lr * decay if decoupled else 1, 0 if decoupled else decay),
        (-1 if settings.maximize else 1) / settings.scale,
    )
    return np.array(numbers, dtype)
