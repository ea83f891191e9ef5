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
    return dict(zip(AGES, map(list, zip(*found, strict=True)), strict=True)) if found else {}


def sample_ages(parameters: Sequence[tuple[MaskedParameter, int]]) -> list[np.ndarray]:
    """Ages of evenly spaced entries, so that each stands for as many, whichever process holds it.

    Args:
        parameters: What this process holds of each parameter, and how many entries the whole one has.
    """
    samples: list[Tensor] = []
    frozen: list[int] = []
    for masked, entries in parameters:
        stride = max(-(-entries // SAMPLE), 1)
        held = masked.ages.numel() * masked.block if masked.layout.size else 0
        if masked.block == 1:
            samples.append(masked.ages[:held:stride])
        else:
            samples.append(
                masked.ages[torch.arange(0, held, stride, device=masked.ages.device) // masked.block]
            )
        # What is not held has no state: it is of age 0.
        frozen.append((masked.layout.size - held) // stride)
    if not samples:
        return []
    # Read at once: each reading would wait for an accelerator.
    signed = torch.cat(samples).cpu().numpy()
    lengths = [len(sample) for sample in samples]
    uncounted = np.repeat([masked.uncounted for masked, _ in parameters], lengths)
    ages = np.where(signed > 0, signed + (uncounted - 1), -1 - signed)
    parts = np.split(ages, np.cumsum(lengths)[:-1])
    return [
        np.concatenate([part, np.zeros(count, part.dtype)]) if count else part
        for part, count in zip(parts, frozen, strict=True)
    ]


Signs = tuple[Tensor, int]
"""1 for each block of consecutive entries that is active and -1 for others, and how many are in a block."""


def signs(masked: MaskedParameter) -> Signs:
    """Which of this process's entries train now."""
    return masked.uncounted_ages().sign(), masked.block


def flipped_blocks(before: Signs, after: Signs) -> Signs:
    """How many blocks train in one and not in the other, as a tensor, and how many entries are in a block."""
    (old, _), (new, block) = (before, after) if before[1] >= after[1] else (after, before)
    difference = old - new if old.shape == new.shape else old.view(-1, 1) - new.view(old.numel(), -1)
    return difference.count_nonzero(), block


def numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Tensors of one element as numbers: read at once, since each reading would wait for an accelerator."""
    if all(tensor.is_cpu for tensor in tensors):
        return [tensor.item() for tensor in tensors]
    return torch.stack([tensor.double() for tensor in tensors]).tolist()
