"""Numbers of parameters by column, which add up over the shards that several processes hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradpolicy.optim.masked_parameter import MaskedParameter

SAMPLE = 4096
"""From how many entries of a parameter, at most, the quartiles of its ages are taken."""
AGES = ("age_min", "age_q25", "age_median", "age_q75", "age_max")
_SHARES = np.array([0.0, 0.25, 0.5, 0.75, 1.0])

Columns = dict[str, list[Any]]
"""A list for each column, of a value for each parameter."""


def added(of_ranks: Sequence[Mapping[str, list[Any]]]) -> Columns:
    """The columns of all processes together: numbers are added, None is nothing; samples are joined."""
    if len(of_ranks) == 1:
        return dict(of_ranks[0])
    return {
        key: [_together(values) for values in zip(*(each[key] for each in of_ranks), strict=True)]
        for key in of_ranks[0]
    }


def _together(values: Sequence[Any]) -> Any:
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    present = [value for value in values if value is not None]
    return sum(present) if present else None


def roots(squares: Sequence[float | None]) -> list[float | None]:
    """Norms from their squares."""
    return [None if square is None else math.sqrt(square) for square in squares]


def age_quartiles(samples: Sequence[np.ndarray]) -> Columns:
    """The quartiles of ages; the lower age where one lies between two."""
    found = []
    for sample in samples:
        places = (_SHARES * (len(sample) - 1)).astype(np.intp)
        found.append(np.sort(sample)[places].tolist() if len(sample) else [None] * len(AGES))
    return {name: [ages[place] for ages in found] for place, name in enumerate(AGES)}


def sample_ages(parameters: Sequence[tuple[MaskedParameter, int]]) -> list[np.ndarray]:
    """Ages of evenly spaced entries, so that each stands for as many, whichever process holds it.

    Args:
        parameters: What this process holds of each parameter, and how many entries the whole one has.
    """
    samples: list[Tensor] = []
    for masked, entries in parameters:
        held, stride = _held(masked), _stride(entries)
        if masked.block == 1:
            samples.append(masked.ages[:held:stride])
        else:
            places = torch.arange(0, held, stride, device=masked.ages.device)
            samples.append(masked.ages[places // masked.block])
    found = []
    for (masked, entries), sample in zip(parameters, _arrays(samples), strict=True):
        signed = sample.astype(np.int32)
        # What is not held has no state: it is of age 0.
        without = np.zeros((masked.layout.size - _held(masked)) // _stride(entries), np.int32)
        ages = np.where(signed > 0, signed + (masked.uncounted - 1), -1 - signed)
        found.append(np.concatenate([ages, without]) if len(without) else ages)
    return found


def _held(masked: MaskedParameter) -> int:
    """Of how many of this process's entries there are ages."""
    return masked.ages.numel() * masked.block if masked.layout.size else 0


def _stride(entries: int) -> int:
    return max(-(-entries // SAMPLE), 1)


def _arrays(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """The tensors' values, from an accelerator all at once: each reading waits for it."""
    if all(tensor.is_cpu for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    return np.split(torch.cat(list(tensors)).cpu().numpy(), ends[:-1])


Flags = tuple[Any, int]
"""Whether each block of consecutive entries is active, and how many entries are in a block."""


def active_flags(masked: MaskedParameter) -> Flags:
    """Which of this process's entries train now: a tensor, or on a CPU an array, with which NumPy is faster."""
    ages = masked.uncounted_ages()
    return (ages.numpy() if ages.is_cpu else ages) > 0, masked.block


def flipped_entries(before: Flags, after: Flags) -> int | Tensor:
    """How many entries train in one and not in the other; of tensors, a tensor."""
    (old, _), (new, block) = (before, after) if before[1] >= after[1] else (after, before)
    different = old.reshape(-1, 1) != new.reshape(len(old), -1)
    return block * (
        int(np.count_nonzero(different)) if isinstance(different, np.ndarray) else different.sum()
    )


def numbers(values: Sequence[Tensor | int]) -> list[float]:
    """Tensors of one element as numbers, from an accelerator all at once: each reading waits for it."""
    if all(isinstance(value, int) or value.is_cpu for value in values):
        return [value if isinstance(value, int) else value.item() for value in values]
    return torch.stack([torch.as_tensor(value).double() for value in values]).tolist()
