"""Cases in which any two values of different parameters meet, of which most run in the slow part only."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def combinations(fast: Collection[tuple[str, ...]], *axes: Sequence[str]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`: those in `fast`, and slow ones until each pair of values meets."""
    product = list(itertools.product(*axes))
    unknown = set(fast) - set(product)
    assert not unknown, f"not among the combinations: {sorted(unknown)}"
    met = set().union(*map(_pairs, fast))
    cases: list[Any] = list(fast)
    while (best := max(product, key=lambda case: len(_pairs(case) - met))) and not _pairs(best) <= met:
        met |= _pairs(best)
        cases.append(pytest.param(*best, marks=pytest.mark.slow))
    return cases


def _pairs(case: tuple[str, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(case), 2))
