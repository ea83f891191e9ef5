"""Ratios against a baseline taken in turn, so that a machine's changing speed touches both alike."""

import statistics
import time
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def paired_times(
    candidate: Callable[[], Any], baseline: Callable[[], Any], *, rounds: int = 15, warmup: int = 3
) -> list[tuple[float, float]]:
    """Times two callables in turn, the order swapped each round.

    Args:
        candidate: What is measured; it must wait for its device itself.
        baseline: What it is measured against.
        rounds: How many pairs are timed.
        warmup: How many pairs run untimed before.

    Returns:
        Pairs of seconds, (candidate, baseline).
    """
    for _ in range(warmup):
        candidate()
        baseline()
    pairs = []
    for number in range(rounds):
        if number % 2:
            against, taken = _seconds(baseline), _seconds(candidate)
        else:
            taken, against = _seconds(candidate), _seconds(baseline)
        pairs.append((taken, against))
    return pairs


def paired_ratio(
    what: str,
    candidate: Callable[[], Any],
    baseline: Callable[[], Any],
    *,
    target: float | None = None,
    rounds: int = 15,
    warmup: int = 3,
    **more: Any,
) -> Row:
    """Measures how long a candidate takes against a baseline, as a row of a benchmark's table.

    The ratio is the median over the pairs; ``low`` and ``high`` are its quartiles.

    Args:
        what: What is measured, in words.
        candidate: What is measured.
        baseline: What it is measured against.
        target: The most that the ratio should be.
        rounds: How many pairs are timed.
        warmup: How many pairs run untimed before.
        **more: Further entries of the row.
    """
    pairs = paired_times(candidate, baseline, rounds=rounds, warmup=warmup)
    ratios = [taken / against for taken, against in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "what": what,
        "ratio": middle,
        "target": target,
        "unit": "time",
        "low": low,
        "high": high,
        "milliseconds": 1e3 * statistics.median(taken for taken, _ in pairs),
        "baseline_milliseconds": 1e3 * statistics.median(against for _, against in pairs),
        **more,
    }


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
