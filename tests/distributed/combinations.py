"""Every combination of some parameters, of which most run in the slow part only."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def combinations(fast: Collection[tuple[str, ...]], *axes: Sequence[str]) -> list[Any]:
    """The product of the axes for `pytest.mark.parametrize`; what is not in `fast` is marked slow."""
    product = list(itertools.product(*axes))
    unknown = set(fast) - set(product)
    assert not unknown, f"not among the combinations: {sorted(unknown)}"
    return [pytest.param(*each, marks=() if each in fast else pytest.mark.slow) for each in product]
