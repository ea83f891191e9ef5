"""The timetable that all mask sources share."""

import pytest

from gradpolicy.errors import PolicyError
from gradpolicy.masks.base import MaskSource


@pytest.mark.parametrize(
    ("timetable", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"every": 3}, [0, 3, 6]),
        ({"every": 3, "start": 2}, [2, 5]),
        ({"every": 2, "start": 1, "stop": 5}, [1, 3]),
        ({"every": None, "start": 4}, [4]),
    ],
)
def test_masks_may_change_at_the_counts_of_the_timetable(timetable: dict, expected: list[int]) -> None:
    source = MaskSource(**timetable)
    periods = [-1, *(source.period(step, 0) for step in range(8))]
    assert [step for step in range(8) if periods[step + 1] > periods[step]] == expected
    assert not any(source.overdue(step, 0) for step in range(8))


def test_the_first_masks_hold_before_start_and_the_last_after_stop() -> None:
    source = MaskSource(every=2, start=3, stop=8)
    assert [source.period(step, 0) for step in range(11)] == [-1, -1, -1, 0, 0, 1, 1, 2, 2, 2, 2]
    assert [source.timetable.begins(period) for period in (-1, 0, 2)] == [3, 3, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unit": "steps"}, "did you mean 'step'"),
        ({"every": 0}, "every"),
        ({"every": 2.5}, "every"),
        ({"start": -1}, "start"),
        ({"start": 5, "stop": 5}, "stop"),
        ({"seed": "3"}, "seed"),
    ],
)
def test_an_impossible_timetable_is_an_error(arguments: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        MaskSource(**arguments)


def test_a_source_that_was_not_begun_says_so(prepared) -> None:
    class Own(MaskSource):
        def __init__(self) -> None:
            self.share = 0.5

    with pytest.raises(PolicyError, match=r"Own.__init__: must call super\(\).__init__"):
        prepared(Own())


def test_a_source_without_masks_says_so(prepared) -> None:
    with pytest.raises(TypeError, match="must define masks"):
        prepared(MaskSource()).masks(0, 0)
