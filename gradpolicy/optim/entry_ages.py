"""Signed ages: whether an entry is active, and how many updates it has had, in one number.

An active entry of age ``a`` is written ``a + 1``, a frozen one ``-(a + 1)``. An update adds 1 to what is
above 0. A new mask turns signs. Numbers have 16 bits until an age needs more.
"""

from __future__ import annotations

import torch
from torch import Tensor

NARROW, WIDE = torch.int16, torch.int32
LAST_NARROW = torch.iinfo(NARROW).max - 1
"""The greatest age that 16 bits hold."""


def all_active(age: int, device: torch.device) -> Tensor:
    """One number that stands for all entries of a tensor, which are active and of this age."""
    return torch.full((1,), age + 1, dtype=NARROW if age < LAST_NARROW else WIDE, device=device)


def signed(active: Tensor, ages: Tensor) -> Tensor:
    """Flags and ages as one; the two broadcast."""
    numbers = torch.where(active, ages + 1, -ages - 1)
    narrow = not ages.numel() or int(ages.max()) < LAST_NARROW
    return numbers.to(NARROW if narrow else WIDE)


def is_active(ages: Tensor) -> Tensor:
    """A flag for each number."""
    return ages > 0


def age_of(ages: Tensor) -> Tensor:
    """How many updates each has had (int64)."""
    return ages.long().abs() - 1


def count(ages: Tensor, updates: int) -> Tensor:
    """The numbers after so many updates of what is active."""
    return torch.where(ages > 0, ages + updates, ages)
