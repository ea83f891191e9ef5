"""How a density is shared out among tensors."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpolicy.masks.sparsity import densities

SHAPES = {"stem": (8, 3, 3, 3), "wide": (64, 32, 3, 3), "fc": (10, 64)}


def test_uniform_is_the_same_everywhere() -> None:
    assert densities(SHAPES, 0.2, "uniform") == dict.fromkeys(SHAPES, 0.2)


def test_erk_is_proportional_to_the_sum_over_the_product_of_the_shape() -> None:
    """``1 − s ∝ (n_in + n_out + w + h) / (n_in · n_out · w · h)``, as RigL's paper has it."""
    shares = densities(SHAPES, 0.05, "erk")
    raw = {name: sum(shape) / math.prod(shape) for name, shape in SHAPES.items()}
    for name in SHAPES:
        assert shares[name] / shares["wide"] == pytest.approx(raw[name] / raw["wide"])


def test_erk_fills_the_smallest_tensors_first() -> None:
    shares = densities(SHAPES, 0.2, "erk")
    assert shares["fc"] == shares["stem"] == 1.0
    assert shares["wide"] < 0.2


@given(
    shapes=st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=4), min_size=1, max_size=6),
    density=st.floats(0.01, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_erk_meets_the_density_of_the_whole_and_none_exceeds_one(
    shapes: list[list[int]], density: float
) -> None:
    named = {str(place): shape for place, shape in enumerate(shapes)}
    shares = densities(named, density, "erk")
    sizes = {name: math.prod(shape) for name, shape in named.items()}
    assert all(0.0 <= share <= 1.0 for share in shares.values())
    total = sum(shares[name] * sizes[name] for name in named)
    assert total == pytest.approx(density * sum(sizes.values()), rel=1e-9)
