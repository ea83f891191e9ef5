"""Densities, and exact selection of the highest scores."""

import math
from fractions import Fraction

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
)


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


def test_of_equal_scores_the_first_tensors_come_first(prepared) -> None:
    weights = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0, 2.0, 1.0])}
    masks = prepared(gp.masks.TopK(0.5, by="weight"), weights).masks(0, 0)
    assert [mask.tolist() for mask in masks.values()] == [[True, False], [True, True, False]]


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


@given(
    shapes=st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=4), min_size=1, max_size=6),
    density=st.floats(0.01, 1.0),
)
@settings(max_examples=60)
def test_erk_meets_the_density_and_is_proportional_to_the_sum_over_the_product(shapes, density):
    """``1 − s ∝ (n_in + n_out + w + h) / (n_in · n_out · w · h)``, as RigL's paper has it, up to one."""
    named = {str(place): shape for place, shape in enumerate(shapes)}
    shares = densities(named, density, "erk")
    sizes = {name: math.prod(shape) for name, shape in named.items()}
    assert all(0.0 <= share <= 1.0 for share in shares.values())
    scales = [shares[name] * sizes[name] / sum(named[name]) for name in named if shares[name] < 1.0]
    assert scales == pytest.approx(scales[:1] * len(scales))
    total = sum(shares[name] * sizes[name] for name in named)
    assert total == pytest.approx(density * sum(sizes.values()), rel=1e-9)
