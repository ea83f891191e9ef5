"""Ratios against a baseline taken in turn, so that a machine's changing speed touches both alike.

A round takes candidate, baseline, baseline, candidate: what rises or falls steadily cancels in its ratio.
Over the rounds the median counts, with its quartiles and a bootstrapped 95 % interval. Beside it stands the
ratio of the fastest times: a machine with other work to do adds to some times and never takes away.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap

Row = dict[str, Any]


def wall_seconds(function: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def paired_times(
    candidate: Callable[[], Any],
    baseline: Callable[[], Any],
    *,
    rounds: int = 15,
    warmup: int = 3,
    seconds: Callable[[Callable[[], Any]], float] = wall_seconds,
) -> tuple[list[float], list[float]]:
    """Times two callables in turn.

    Args:
        candidate: What is measured; it must wait for its device itself.
        baseline: What it is measured against.
        rounds: How often each is timed at least; two make a round.
        warmup: How often both run untimed before.
        seconds: Runs one of them and says how long it took.

    Returns:
        Seconds of the candidate and of the baseline, each two a round.
    """
    for _ in range(warmup):
        candidate()
        baseline()
    taken, against = [], []
    for _ in range((rounds + 1) // 2):
        taken.append(seconds(candidate))
        against += [seconds(baseline), seconds(baseline)]
        taken.append(seconds(candidate))
    return taken, against


def paired_ratio(
    what: str,
    candidate: Callable[[], Any],
    baseline: Callable[[], Any],
    *,
    target: float | None = None,
    rounds: int = 15,
    warmup: int = 3,
    seconds: Callable[[Callable[[], Any]], float] = wall_seconds,
    **more: Any,
) -> Row:
    """Measures how long a candidate takes against a baseline, as a row of a benchmark's table.

    The ratio is the median over the rounds; ``low`` and ``high`` are its quartiles, ``at_least`` and
    ``at_most`` the ends of its 95 % interval; ``fastest`` is the ratio of the fastest fifths.

    Args:
        what: What is measured, in words.
        candidate: What is measured.
        baseline: What it is measured against.
        target: The most that the ratio should be.
        rounds: How often each is timed at least.
        warmup: How often both run untimed before.
        seconds: Runs one of them and says how long it took.
        **more: Further entries of the row.
    """
    taken, against = paired_times(candidate, baseline, rounds=rounds, warmup=warmup, seconds=seconds)
    ratios = [sum(taken[i : i + 2]) / sum(against[i : i + 2]) for i in range(0, len(taken), 2)]
    return {
        **time_row(what, ratios, taken, against, target),
        "fastest": _fastest(taken) / _fastest(against),
        **more,
    }


def time_row(
    what: str,
    ratios: Sequence[float],
    taken: Sequence[float],
    against: Sequence[float],
    target: float | None = None,
) -> Row:
    """The row of several ratios of times; see :func:`paired_ratio`.

    Args:
        what: What was measured, in words.
        ratios: A ratio for each round.
        taken: Seconds of what was measured.
        against: Seconds of what it was measured against.
        target: The most that the ratio should be.
    """
    low, middle, high = statistics.quantiles(ratios, n=4)
    at_least, at_most = interval_of_median(ratios)
    return {
        "what": what,
        "ratio": middle,
        "target": target,
        "unit": "time",
        "low": low,
        "high": high,
        "at_least": at_least,
        "at_most": at_most,
        "milliseconds": 1e3 * statistics.median(taken),
        "baseline_milliseconds": 1e3 * statistics.median(against),
    }


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a median, by resampling.

    Example:
        >>> interval_of_median([1.0] * 19 + [9.0])
        (1.0, 1.0)
    """
    found = bootstrap((values,), np.median, method="percentile", rng=np.random.default_rng(0))
    low, high = found.confidence_interval
    return float(low), float(high)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch compute on one thread within: what little a step costs more is not lost in their meeting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fastest(times: Sequence[float]) -> float:
    return statistics.mean(sorted(times)[: max(len(times) // 5, 1)])
