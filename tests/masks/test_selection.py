"""Densities, and exact selection of the highest scores."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.masks.selection import (
    densities,
    highest,
    kept_count,
    marks_of_highest,
)


def highest_together(scores: dict[str, torch.Tensor], kept: int) -> dict[str, torch.Tensor]:
    """The marks of the highest scores of all tensors, each given as a whole."""
    dtype = torch.cat([tensor.flatten() for tensor in scores.values()]).dtype
    parts = {name: lambda tensor=tensor: iter([tensor.flatten()]) for name, tensor in scores.items()}
    marks = marks_of_highest(parts, kept, sum(tensor.numel() for tensor in scores.values()), dtype)
    return {name: torch.cat(each).reshape(scores[name].shape) for name, each in marks}


@given(
    scores=st.lists(st.one_of(st.integers(-3, 3).map(float), st.floats(width=32)), min_size=1, max_size=40),
    kept=st.integers(-1, 45),
)
@settings(max_examples=80)
def test_exactly_so_many_are_marked_and_none_left_out_is_higher(scores: list[float], kept: int) -> None:
    order = sorted(range(len(scores)), key=lambda i: math.inf if math.isnan(scores[i]) else -scores[i])
    expected = sorted(order[: max(kept, 0)])
    marked = highest(torch.tensor(scores), kept)
    assert marked.nonzero().flatten().tolist() == expected


@given(
    density=st.floats(0.01, 1.0).map(lambda share: round(share, 9)),
    count=st.integers(1, 60),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_a_density_keeps_what_lies_at_or_above_the_percentile(density: float, count: int, seed: int) -> None:
    scores = np.random.default_rng(seed).permutation(count).astype(np.float64)
    kept = int((scores >= np.percentile(scores, (1 - density) * 100) - 1e-14 * count).sum())
    assert kept_count(density, count) == kept


@given(
    parts=st.lists(st.lists(st.integers(-2, 2).map(float), max_size=8), min_size=1, max_size=4),
    kept=st.integers(0, 20),
)
@settings(max_examples=80)
def test_of_equal_scores_the_first_tensors_come_first(parts: list[list[float]], kept: int) -> None:
    scores = {str(place): torch.tensor(part) for place, part in enumerate(parts)}
    together = torch.cat([marks.flatten() for marks in highest_together(scores, kept).values()])
    assert torch.equal(together, highest(torch.cat(list(scores.values())), kept))


@pytest.mark.parametrize(
    ("density", "count"), [("1e-7", 20_000_000), ("0.999999999", 35), ("0.29", 101), ("0.4331", 244602430)]
)
def test_the_count_is_that_of_exact_arithmetic(density: str, count: int) -> None:
    share = Fraction(density)
    assert kept_count(float(density), count) == count - math.ceil((1 - share) * (count - 1))


# ---- densities


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (gp.masks.Constant(2), r"Constant\.value: expected a number between 0 and 1, got 2\.0"),
        (gp.masks.Cubic(1.5, 0.1, steps=3), r"Cubic\.start: expected a number between 0 and 1, got 1\.5"),
        (gp.masks.Linear(0.5, -0.1, steps=3), r"Linear\.stop: expected a number between 0 and 1, got -0\.1"),
    ],
)
def test_a_ready_made_schedule_that_leaves_the_shares_is_an_error_at_once(schedule, text) -> None:
    with pytest.raises(PolicyError, match=rf"TopK\.density: {text}"):
        gp.masks.TopK(schedule)


@pytest.mark.parametrize("schedule", [gp.masks.Linear, lambda: 0.5, lambda step, epoch: 0.5])
def test_a_schedule_takes_the_count_alone(schedule) -> None:
    with pytest.raises(PolicyError, match=r"Random\.density: must take the count alone"):
        gp.masks.Random(schedule)


SHAPES = {"stem": (8, 3, 3, 3), "wide": (64, 32, 3, 3), "fc": (10, 64)}


def test_erk_is_proportional_to_the_sum_over_the_product_of_the_shape() -> None:
    """``1 − s ∝ (n_in + n_out + w + h) / (n_in · n_out · w · h)``, as RigL's paper has it."""
    shares = densities(SHAPES, 0.05, "erk")
    raw = {name: sum(shape) / math.prod(shape) for name, shape in SHAPES.items()}
    for name in SHAPES:
        assert shares[name] / shares["wide"] == pytest.approx(raw[name] / raw["wide"])


@given(
    shapes=st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=4), min_size=1, max_size=6),
    density=st.floats(0.01, 1.0),
)
@settings(max_examples=60)
def test_erk_meets_the_density_of_the_whole_and_none_exceeds_one(shapes, density):
    named = {str(place): shape for place, shape in enumerate(shapes)}
    shares = densities(named, density, "erk")
    sizes = {name: math.prod(shape) for name, shape in named.items()}
    assert all(0.0 <= share <= 1.0 for share in shares.values())
    total = sum(shares[name] * sizes[name] for name in named)
    assert total == pytest.approx(density * sum(sizes.values()), rel=1e-9)
