"""Numbers of parameters by column, which add up over the shards that several processes hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    summed = {
        key: [_together(values) for values in zip(*(each[key] for each in of_ranks), strict=True)]
        for key in of_ranks[0]
        if key != "parameter"
    }
    return {"parameter": of_ranks[0]["parameter"], **summed}


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


@dataclass(frozen=True)
class AgeSample:
    """Signed ages of evenly spaced entries of parameters, as they lie on their device.

    Attributes:
        signed: Those of all parameters, one after the other; None where there is no parameter.
        lengths: How many are of each.
        uncounted: Updates of each parameter's active entries that these ages do not tell.
        without: How many more entries of each are of age 0, since they have no state.
    """

    signed: Tensor | None
    lengths: list[int]
    uncounted: list[int]
    without: list[int]

    @classmethod
    def of(cls, parameters: Iterable[tuple[MaskedParameter, int]]) -> AgeSample:
        """Takes a sample in which each age stands for as many entries, whichever process holds them.

        Args:
            parameters: What this process holds of each parameter, and how many entries the whole one has.
        """
        samples, uncounted, without = [], [], []
        for masked, entries in parameters:
            stride = max(-(-entries // SAMPLE), 1)
            ages = masked.ages
            held = ages.signed.numel() * ages.block if ages.entries else 0
            if ages.block == 1:
                samples.append(ages.signed[:held:stride])
            else:
                places = torch.arange(0, held, stride, device=ages.signed.device)
                samples.append(ages.signed[places // ages.block])
            uncounted.append(ages.uncounted)
            without.append((ages.entries - held) // stride)
        signed = torch.cat(samples) if samples else None
        return cls(signed, [len(sample) for sample in samples], uncounted, without)

    def read(self) -> list[np.ndarray]:
        """The ages of each parameter."""
        if self.signed is None:
            return []
        signed = self.signed.cpu().numpy().astype(np.int32)
        added = np.repeat(np.array(self.uncounted, np.int32) - 1, self.lengths)
        ages = np.where(signed > 0, signed + added, -1 - signed)
        parts = np.split(ages, np.cumsum(self.lengths)[:-1])
        return [
            np.concatenate([part, np.zeros(count, np.int32)]) if count else part
            for part, count in zip(parts, self.without, strict=True)
        ]


Flags = tuple[Any, int]
"""Whether each block of consecutive entries is active, and how many entries are in a block."""


def active_flags(masked: MaskedParameter) -> Flags:
    """Which of this process's entries train now: a tensor, or on a CPU, where NumPy is faster, an array."""
    ages = masked.ages.of_all_blocks()
    return (ages.numpy() if ages.is_cpu else ages) > 0, masked.ages.block


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
