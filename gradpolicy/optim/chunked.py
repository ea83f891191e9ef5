"""The dense update in torch operations that stay in the cache: what runs where nothing can be compiled.

Operations that choose by a flag (`where`, `masked_fill`) are not vectorized by torch on a CPU: one of them
costs several fused steps. So a mask is a number here: all bits set or none, and -1 or 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim.adam import Job, Settings, compute_dtype

STRETCH = 1 << 18
"""Entries handled at once: few enough for the cache, and so many that a call's own cost is hidden."""
WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of as many bytes."""


def dense(job: Job) -> None:
    """Update all active entries of a tensor with a code and moments for every entry, on a CPU."""
    update = _AllOneAge(job) if len(job.ages) == 1 else _AgesOfTheirOwn(job)
    for start in range(0, job.parameter.numel(), STRETCH):
        part = slice(start, start + STRETCH)
        vectors = [vector[part] for vector in (job.parameter, job.gradient, *job.moments)]
        update(vectors, job.codes[part])


class _Room:
    """Memory for one stretch of entries, used again by the next."""

    def __init__(self, job: Job, dtype: torch.dtype, vectors: int) -> None:
        self.count = min(job.parameter.numel(), STRETCH)
        self.vectors = [torch.empty(self.count, dtype=dtype) for _ in range(vectors)]
        self.bits = torch.empty(self.count, dtype=WHOLE[dtype.itemsize])
        self.signs = torch.empty(self.count, dtype=job.codes.dtype)

    def masks(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """-1 where active, else 0: narrow as the codes, and wide as the vectors (all bits or none)."""
        count = codes.numel()
        signs = torch.clamp(codes, -1, 0, out=self.signs[:count])
        return signs, self.bits[:count].copy_(signs)


class _AllOneAge:
    """Torch's fused step on copies, of which active entries are taken over: as whole numbers, bit for bit."""

    def __init__(self, job: Job) -> None:
        settings = job.settings
        self.room = _Room(job, job.parameter.dtype, 1 + len(job.moments))
        self.step = torch.tensor(float(job.ages[0] + 1))
        self.scale = None if settings.scale == 1.0 else torch.tensor(settings.scale)
        self.function: Any = torch._fused_adamw_ if settings.decoupled else torch._fused_adam_
        self.options = {
            "lr": settings.lr,
            "beta1": settings.beta1,
            "beta2": settings.beta2,
            "weight_decay": settings.weight_decay,
            "eps": settings.eps,
            "amsgrad": settings.amsgrad,
            "maximize": settings.maximize,
        }

    def __call__(self, vectors: Sequence[Tensor], codes: Tensor) -> None:
        gradient, targets = vectors[1], [vectors[0], *vectors[2:]]
        if self.scale is not None:
            gradient = gradient.clone()  # the fused step would write the unscaled one back
        copies = [copy[: codes.numel()] for copy in self.room.vectors]
        torch._foreach_copy_(copies, targets)
        each = [[copy] for copy in copies] + [[]] * (4 - len(copies))
        self.function(each[0], [gradient], *each[1:], [self.step], **self.options, grad_scale=self.scale)
        _, bits = self.room.masks(codes)
        for copy, target in zip(copies, targets, strict=True):
            new, old = copy.view(bits.dtype), target.view(bits.dtype)
            old.addcmul_(new.sub_(old), bits, value=-1)  # old + (new - old) where active


class _AgesOfTheirOwn:
    """Adam by each entry's age.

    The gradient of a frozen entry is made 0 whatever it was, its moments change by 0 times something, and
    +0 is taken from its value, which leaves every value as it is. With a = (1 - b1^t) / sqrt(1 - b2^t),
    b = eps (1 - b1^t) and r = 1 / sqrt(v) the update is lr * m r / (a + b r).
    """

    def __init__(self, job: Job) -> None:
        self.settings, dtype = job.settings, compute_dtype(job.parameter.dtype)
        self.room = _Room(job, dtype, 3)
        copies = 1 + len(job.moments) if job.parameter.dtype is not dtype else 0
        self.copies = [torch.empty(self.room.count, dtype=dtype) for _ in range(copies)]
        self.slots = torch.empty(self.room.count, dtype=job.codes.dtype)
        self.index = torch.empty(self.room.count, dtype=torch.int64)
        ages = torch.tensor(job.ages, dtype=torch.float64) + 1
        table = torch.ones(max(job.slots, len(ages)), 2, dtype=torch.float64)
        remaining = 1 - self.settings.beta1**ages
        table[: len(ages), 0] = remaining / (1 - self.settings.beta2**ages).sqrt()
        table[: len(ages), 1] = remaining * self.settings.eps
        # As complex numbers both are looked up at once.
        self.table = torch.view_as_complex(table.to(dtype))
        self.pairs = torch.empty(self.room.count, dtype=self.table.dtype)

    def __call__(self, vectors: Sequence[Tensor], codes: Tensor) -> None:
        own = [vectors[0], *vectors[2:]]
        count, wide = codes.numel(), own
        if self.copies:
            wide = [copy[:count].copy_(each) for copy, each in zip(self.copies, own, strict=True)]
        self._update(wide[0], vectors[1], wide[1:], codes)
        if self.copies:
            for copy, each in zip(wide, own, strict=True):
                each.copy_(copy)

    def _update(self, parameter: Tensor, gradient: Tensor, moments: Sequence[Tensor], codes: Tensor) -> None:
        settings, count = self.settings, codes.numel()
        scratch, quotient, weight = (vector[:count] for vector in self.room.vectors)
        signs, bits = self.room.masks(codes)
        gradient = self._masked_gradient(parameter, gradient, bits, scratch)
        _update_moments(gradient, moments, (signs, bits), settings, (quotient, weight))
        smallest = torch.finfo(quotient.dtype).tiny if settings.eps else 0.0
        torch.clamp_min(moments[-1], smallest, out=quotient).rsqrt_()
        divisor = self._divisor(quotient, codes, scratch)
        quotient.mul_(moments[0]).div_(divisor)
        if settings.weight_decay and settings.decoupled:
            quotient.add_(parameter, alpha=settings.weight_decay)
        parameter.sub_(_and(quotient, bits, quotient), alpha=settings.lr)

    def _masked_gradient(self, parameter: Tensor, gradient: Tensor, bits: Tensor, out: Tensor) -> Tensor:
        """The gradient to go by, 0 where frozen."""
        settings = self.settings
        factor = (-1.0 if settings.maximize else 1.0) / settings.scale
        coupled = settings.weight_decay and not settings.decoupled
        if factor == 1.0 and not coupled and gradient.dtype is out.dtype:
            return _and(gradient, bits, out)
        out.copy_(gradient).mul_(factor)
        if coupled:
            out.add_(parameter, alpha=settings.weight_decay)
        return _and(out, bits, out)

    def _divisor(self, roots: Tensor, codes: Tensor, out: Tensor) -> Tensor:
        """The a + b r of each entry."""
        count = codes.numel()
        slots = torch.bitwise_and(codes, torch.iinfo(codes.dtype).max, out=self.slots[:count])
        index = self.index[:count].copy_(slots)
        pairs = torch.view_as_real(torch.index_select(self.table, 0, index, out=self.pairs[:count]))
        return torch.addcmul(pairs[:, 0], roots, pairs[:, 1], out=out)


def _update_moments(
    gradient: Tensor,
    moments: Sequence[Tensor],
    masks: tuple[Tensor, Tensor],
    settings: Settings,
    room: tuple[Tensor, Tensor],
) -> None:
    first, second, *largest = moments
    signs, bits = masks
    first.lerp_(gradient, room[1].copy_(signs).mul_(settings.beta1 - 1))
    # A second moment may be infinite, and 0 times infinity is not 0.
    second.add_(_and(second, bits, room[0]), alpha=settings.beta2 - 1)
    second.addcmul_(gradient, gradient, value=1 - settings.beta2)
    for each in largest:
        torch.maximum(each, second, out=each)  # never below a paused second moment


def _and(values: Tensor, bits: Tensor, out: Tensor) -> Tensor:
    torch.bitwise_and(values.view(bits.dtype), bits, out=out.view(bits.dtype))
    return out
