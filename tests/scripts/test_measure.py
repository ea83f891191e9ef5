"""Benchmarks compare two callables in turn, and say how sure the ratio is."""

from collections.abc import Callable
from types import SimpleNamespace

from benchmarks import measure


def test_both_are_timed_in_turn_after_a_warmup_and_the_row_says_how_sure_it_is(monkeypatch) -> None:
    calls: list[str] = []
    elapsed: list[float] = []
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: sum(elapsed)))

    def timed(name: str, seconds: list[float]) -> Callable[[], None]:
        remaining = iter(seconds)

        def run() -> None:
            calls.append(name)
            elapsed.append(next(remaining))

        return run

    a = timed("a", [9.0, *[2.0] * 8, 50.0, 50.0])
    b = timed("b", [9.0, *[1.0] * 10])
    row = measure.paired_ratio("a / b", a, b, target=1.5, rounds=10, warmup=1)
    assert calls == ["a", "b", *["a", "b", "b", "a"] * 5]
    assert row["ratio"] == row["low"] == row["fastest"] == 2.0
    assert row["at_least"] == 2.0
    assert row["high"] > 2.0
    assert row["milliseconds"] == 2000.0
