"""The dense update through torch.compile, for accelerators that no kernel of ours serves (MPS and others)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gradpolicy.optim import adam


def wanted(job: adam.Job) -> bool:
    """Whether to compile: on an accelerator, where every separate operation would cross memory once more."""
    return job.parameter.device.type != "cpu"


@functools.cache
def _function() -> Callable[[list[Tensor], Tensor, Tensor, adam.Settings], None]:
    """`adam.dense` through torch.compile, for any number of entries and slots."""
    return torch.compile(adam.dense, dynamic=True, fullgraph=True)


_failed = False


def dense(job: adam.Job) -> None:
    """The update of all active entries, compiled; plain where compiling fails, which is said once."""
    global _failed
    if not _failed:
        gradient = job.gradient if job.settings.scale == 1 else job.gradient / job.settings.scale
        vectors, settings = [job.parameter, gradient, *job.moments], replace(job.settings, scale=1.0)
        try:
            _function()(vectors, job.codes, adam.tables(job), settings)
            return
        except Exception as error:  # the compiler fails in many ways, before anything is written
            _failed = True
            warnings.warn(f"gradpolicy: masked updates run uncompiled ({type(error).__name__})", stacklevel=2)
    adam.dense_in_chunks(job)
