"""When gradients are asked for, and when a decision by them is made."""

import pytest
import torch

import gradpolicy as gp


def course(source, counts: range, epochs: bool = False) -> tuple[list[int], list[int]]:
    """The counts at which gradients are wanted, and those at which a decision is made."""
    wanted, decided = [], []
    for count in counts:
        times = (10 * count, count) if epochs else (count, 0)
        if source.overdue(*times):
            decided.append(count)
        source.masks(*times)
        assert not source.overdue(*times)
        if source.gradient_names(*times):
            assert source.gradient_names(*times) == {"w"}
            wanted.append(count)
            source.observe({"w": torch.ones(4, 4)})
    return wanted, decided


@pytest.mark.parametrize("unit", ["step", "epoch"])
@pytest.mark.parametrize(
    ("timetable", "wanted", "decided"),
    [
        ({"every": None}, [0, 1], [2]),
        ({"every": None, "start": 5}, [3, 4], [5]),
        ({"every": None, "start": 1}, [0, 1], [2]),
        ({"every": 4}, [0, 1, 2, 3, 6, 7, 10, 11], [2, 4, 8]),
        ({"every": 4, "start": 6}, [4, 5, 8, 9], [6, 10]),
        ({"every": 4, "start": 2, "stop": 6}, [0, 1], [2]),
        ({"every": 4, "start": 2, "stop": 7}, [0, 1, 4, 5], [2, 6]),
    ],
)
def test_a_window_of_gradients_comes_before_each_change(prepared, unit, timetable, wanted, decided) -> None:
    source = prepared(gp.masks.TopK(unit=unit, **{"window": 2, **timetable}), {"w": torch.ones(4, 4)})
    assert course(source, range(12), unit == "epoch") == (wanted, decided)
