"""Density over time follows its formula."""

import math

import pytest

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.masks.density import as_schedule, density_at

CURVES = {
    gp.masks.Linear: lambda passed: 1 - passed,
    gp.masks.Cosine: lambda passed: (1 + math.cos(math.pi * passed)) / 2,
    gp.masks.Cubic: lambda passed: (1 - passed) ** 3,
}


@pytest.mark.parametrize("kind", CURVES)
@pytest.mark.parametrize(("start", "stop"), [(1.0, 0.1), (0.0, 0.5)])
def test_a_ramp_follows_its_curve(kind: type, start: float, stop: float) -> None:
    density = kind(start, stop, steps=40, begin=10)
    for count in range(60):
        passed = min(max((count - 10) / 40, 0), 1)
        assert density(count) == pytest.approx(stop + (start - stop) * CURVES[kind](passed), abs=1e-12)


def test_a_ramp_holds_its_ends_exactly() -> None:
    for kind in CURVES:
        density = kind(0.7, 0.3, steps=5, begin=2)
        assert (density(0), density(2), density(7), density(99)) == (0.7, 0.7, 0.3, 0.3)


def test_a_number_is_a_constant_schedule() -> None:
    assert [as_schedule("Random.density", 0.25)(count) for count in (0, 1000)] == [0.25, 0.25]


def test_any_function_of_the_count_is_a_schedule() -> None:
    assert density_at(as_schedule("Random.density", lambda count: 1 / (1 + count)), 3) == 0.25
    assert density_at(as_schedule("Random.density", gp.schedules.Linear(1.0, 0.0, steps=4)), 1) == 0.75


@pytest.mark.parametrize("value", [-0.1, 1.1, "much", True, math.nan])
def test_what_is_no_share_is_an_error(value: object) -> None:
    with pytest.raises(PolicyError, match="between 0 and 1"):
        as_schedule("Random.density", value)


def test_a_schedule_that_leaves_the_shares_is_an_error() -> None:
    with pytest.raises(PolicyError, match="density at 3"):
        density_at(lambda count: float(count), 3)


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(PolicyError, match="Cubic: takes no argument 'stp'; did you mean 'stop'"):
        gp.masks.Cubic(1.0, stp=0.1, steps=3)


def test_a_flag_is_true_or_false() -> None:
    with pytest.raises(PolicyError, match=r"Random.rescale: must be True or False, got 'no'"):
        gp.masks.Random(0.5, rescale="no")


def test_a_ramp_without_steps_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"Linear\.steps"):
        gp.masks.Linear(1.0, 0.0, steps=0)


@pytest.mark.parametrize("schedule", [gp.masks.Linear, lambda: 0.5, lambda step, epoch: 0.5])
def test_a_schedule_takes_the_count_alone(schedule) -> None:
    with pytest.raises(PolicyError, match=r"Random\.density: must take the count alone"):
        gp.masks.Random(schedule)
