"""The density over time, and shared out among tensors."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.masks.density import as_density, densities, density_at


def test_a_number_is_a_constant_schedule() -> None:
    assert [as_density("Random.density", 0.25)(count) for count in (0, 1000)] == [0.25, 0.25]


def test_any_function_of_the_count_is_a_schedule() -> None:
    assert density_at(as_density("Random.density", lambda count: 1 / (1 + count)), 3) == 0.25
    assert density_at(as_density("Random.density", gp.schedules.Linear(1.0, 0.0, steps=4)), 1) == 0.75


@pytest.mark.parametrize("value", [-0.1, 1.1, "much", True, math.nan])
def test_what_is_no_share_is_an_error(value: object) -> None:
    with pytest.raises(PolicyError, match="between 0 and 1"):
        as_density("Random.density", value)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (gp.masks.Constant(2), r"Constant\.value: must be a number between 0 and 1, got 2\.0"),
        (gp.masks.Cubic(1.5, 0.1, steps=3), r"Cubic\.start: must be a number between 0 and 1, got 1\.5"),
        (gp.masks.Linear(0.5, -0.1, steps=3), r"Linear\.stop: must be a number between 0 and 1, got -0\.1"),
    ],
)
def test_a_ready_made_schedule_that_leaves_the_shares_is_an_error_at_once(schedule, text) -> None:
    with pytest.raises(PolicyError, match=rf"TopK\.density: {text}"):
        gp.masks.TopK(schedule)


def test_a_schedule_that_leaves_the_shares_is_an_error() -> None:
    with pytest.raises(PolicyError, match="density at 3"):
        density_at(lambda count: float(count), 3)


def test_a_flag_is_true_or_false() -> None:
    with pytest.raises(PolicyError, match=r"Random.rescale: must be True or False, got 'no'"):
        gp.masks.Random(0.5, rescale="no")


@pytest.mark.parametrize("schedule", [gp.masks.Linear, lambda: 0.5, lambda step, epoch: 0.5])
def test_a_schedule_takes_the_count_alone(schedule) -> None:
    with pytest.raises(PolicyError, match=r"Random\.density: must take the count alone"):
        gp.masks.Random(schedule)


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
