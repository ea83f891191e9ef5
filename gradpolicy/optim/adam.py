"""Adam and AdamW for each entry by its own age: the arithmetic, and the plain torch way to run it.

For an entry at its t-th update since its moments were last empty (Kingma & Ba 2015, arXiv:1412.6980;
decoupled decay: Loshchilov & Hutter 2019, arXiv:1711.05101; AMSGrad: Reddi et al. 2018, arXiv:1904.09237):

    m = b1 m + (1 - b1) g          p = p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    v = b2 v + (1 - b2) g^2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim import cohorts
from gradpolicy.optim.packed import Held

Dense = Callable[["Job"], None]
MOMENTS = ("exp_avg", "exp_avg_sq")
LARGEST = "max_exp_avg_sq"


def moment_keys(group: dict[str, Any]) -> list[str]:
    """Names of the moments in the optimizer's state."""
    return [*MOMENTS, LARGEST] if group["amsgrad"] else [*MOMENTS]


@dataclass(frozen=True)
class Settings:
    """One param group's numbers; `scale` is what the gradients were multiplied by (fp16)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool
    maximize: bool
    scale: float = 1.0

    @classmethod
    def of(cls, group: dict[str, Any], scale: float = 1.0) -> Settings:
        """Read them off a param group of torch's Adam or AdamW."""
        beta1, beta2 = group["betas"]
        return cls(
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            bool(group.get("decoupled_weight_decay", False)),
            bool(group["amsgrad"]),
            bool(group["maximize"]),
            scale,
        )

    @property
    def coupled(self) -> bool:
        """Whether weight decay goes through the gradient."""
        return self.weight_decay != 0 and not self.decoupled

    def corrections(self, ages: tuple[int, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For entries of these ages: lr / (1 - b1^t) and sqrt(1 - b2^t) at the next update."""
        step_sizes = tuple([self.lr / (1 - self.beta1 ** (age + 1)) for age in ages])
        roots = tuple([(1 - self.beta2 ** (age + 1)) ** 0.5 for age in ages])
        return step_sizes, roots


@dataclass
class Job:
    """One tensor's update, all vectors flat and in memory order.

    Attributes:
        parameter: all entries; so is `gradient`.
        moments: first, second, and AMSGrad's maximum if asked for: all entries, or those in `held`.
        codes: cohort codes of all blocks, or of those in `held`; active ones are negative.
        block: entries that one code governs.
        ages: updates so far of each active slot.
        settings: the group's numbers.
        held: which blocks the moments and codes are of; None: all.
        slots: highest slot of any code, frozen ones too, plus one.
        rows: blocks to update where they are more than one entry: those held, or else the active ones.
        density: the share of all entries that is active.
    """

    parameter: Tensor
    gradient: Tensor
    moments: list[Tensor]
    codes: Tensor
    block: int
    ages: tuple[int, ...]
    settings: Settings
    held: Held | None = None
    slots: int = 1
    rows: Tensor | None = None
    density: float = 1.0

    @property
    def corrections(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For each active slot lr / (1 - b1^t) and sqrt(1 - b2^t) at this update."""
        return self.settings.corrections(self.ages)


def adam_entries(
    parameter: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    step_size: Tensor,
    root: Tensor,
    settings: Settings,
) -> tuple[Tensor, list[Tensor]]:
    """One update of entries of any shape, without side effects.

    Args:
        parameter: values, in the dtype to compute in, as are `gradient` and `moments`.
        gradient: gradients.
        moments: first and second moment; a third one asks for AMSGrad.
        step_size: lr / (1 - b1^t) of each entry, broadcastable.
        root: sqrt(1 - b2^t) of each entry, broadcastable.
        settings: the group's numbers.

    Returns:
        The new parameter and the new moments.
    """
    first, second, *largest = moments
    if settings.scale != 1.0:
        gradient = gradient / settings.scale
    if settings.maximize:
        gradient = -gradient
    if settings.weight_decay and settings.decoupled:
        parameter = parameter * (1 - settings.lr * settings.weight_decay)
    elif settings.weight_decay:
        gradient = gradient + parameter * settings.weight_decay
    first = first + (gradient - first) * (1 - settings.beta1)
    second = second * settings.beta2 + gradient * gradient * (1 - settings.beta2)
    moments = [first, second]
    if largest:
        moments.append(torch.maximum(largest[0], second))
    denominator = moments[-1].sqrt() / root + settings.eps
    return parameter - step_size * (first / denominator), moments


def run(job: Job, dense: Dense) -> None:
    """Carry out a job with torch operations, a cacheful of entries at a time.

    Args:
        job: what to do.
        dense: does entries that all have their own code and moments.
    """
    if job.block > 1:
        _run_rows(job, tables(job))
    elif job.held is not None:
        both = tables(job)
        for positions, place in job.held.chunks():
            _gathered(job, job.parameter, job.gradient, positions, place, both)
    else:
        dense(job)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What to compute in: half precision is computed in float32, as torch's fused Adam does."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def tables(job: Job) -> Tensor:
    """The corrections as a (2, slots) tensor."""
    dtype, device = compute_dtype(job.parameter.dtype), job.parameter.device
    return torch.tensor(job.corrections, dtype=dtype, device=device)


def _look_up(codes: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Corrections of each code; codes of frozen entries give some finite value."""
    if tables.shape[1] == 1:
        return tables[0], tables[1]
    slots = (codes & torch.iinfo(codes.dtype).max).int().clamp_(max=tables.shape[1] - 1)
    return tables[0].index_select(0, slots), tables[1].index_select(0, slots)


def dense(vectors: list[Tensor], codes: Tensor, tables: Tensor, settings: Settings) -> None:
    """Update the active ones of a stretch of entries in place.

    Args:
        vectors: parameter, gradient and moments.
        codes: a code an entry.
        tables: step sizes and roots of the active slots.
        settings: the group's numbers.
    """
    active, dtype = codes < 0, tables.dtype
    parameter, gradient, *moments = (vector.to(dtype) for vector in vectors)
    # A frozen entry's gradient may be anything: what comes of it is thrown away.
    new, updated = adam_entries(parameter, gradient, moments, *_look_up(codes, tables), settings)
    targets = [vectors[0], *vectors[2:]]
    for target, value in zip(targets, [new, *updated], strict=True):
        target.copy_(torch.where(active, value.to(target.dtype), target))


def dense_in_chunks(job: Job) -> None:
    """The whole of a job that `run` leaves to it, so many entries at a time as their device likes."""
    both, vectors = tables(job), [job.parameter, job.gradient, *job.moments]
    count = cohorts.chunk(job.parameter.device)
    for start in range(0, job.parameter.numel(), count):
        part = slice(start, start + count)
        dense([vector[part] for vector in vectors], job.codes[part], both, job.settings)


def _gathered(
    job: Job, parameter: Tensor, gradient: Tensor, positions: Tensor, place: slice | Tensor, tables: Tensor
) -> None:
    """Update the (rows of) entries at `positions`, whose moments and codes lie at `place`."""
    dtype, row = tables.dtype, (-1,) + (1,) * (parameter.dim() - 1)
    moments = [moment.view(-1, *parameter.shape[1:]) for moment in job.moments]
    step_size, root = (value.view(row) for value in _look_up(job.codes[place], tables))
    new, updated = adam_entries(
        parameter.index_select(0, positions).to(dtype),
        gradient.index_select(0, positions).to(dtype),
        [moment[place].to(dtype) for moment in moments],
        step_size,
        root,
        job.settings,
    )
    parameter.index_copy_(0, positions, new.to(parameter.dtype))
    for moment, value in zip(moments, updated, strict=True):
        moment[place] = value.to(moment.dtype)


def _run_rows(job: Job, tables: Tensor) -> None:
    parameter, gradient = job.parameter.view(-1, job.block), job.gradient.view(-1, job.block)
    rows = job.rows
    assert rows is not None
    count = max(1, cohorts.chunk(parameter.device) // job.block)
    for start in range(0, rows.numel(), count):
        part = rows[start : start + count]
        place = part if job.held is None else slice(start, start + count)
        _gathered(job, parameter, gradient, part, place, tables)
