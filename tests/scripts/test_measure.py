"""Benchmarks compare two callables in turn, and say how sure the ratio is."""

import pytest

from benchmarks import measure


class Clock:
    """Stands for ``time``: goes on as far as each callable says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def callable(self, name: str, seconds: list[float]):
        remaining = iter(seconds)

        def run() -> None:
            self.calls.append(name)
            self.now += next(remaining)

        return run


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measure, "time", made)
    return made


def test_both_are_timed_in_turn_after_a_warmup(clock) -> None:
    a, b = clock.callable("a", [9.0, 1.0, 2.0, 1.0, 2.0]), clock.callable("b", [9.0, 3.0, 4.0, 3.0, 4.0])
    row = measure.paired_ratio("a / b", a, b, rounds=4, warmup=1)
    assert clock.calls == ["a", "b", *["a", "b", "b", "a"] * 2]
    assert row["ratio"] == pytest.approx(3 / 7)


def test_the_row_has_median_quartiles_interval_and_the_fastest(clock) -> None:
    a = clock.callable("a", [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 50.0, 50.0])
    b = clock.callable("b", [1.0] * 10)
    row = measure.paired_ratio("a / b", a, b, target=1.5, rounds=10, warmup=0)
    assert row["ratio"] == row["low"] == row["fastest"] == 2.0
    assert row["at_least"] == 2.0
    assert row["high"] > 2.0
    assert row["milliseconds"] == 2000.0
