"""Ratios of a candidate's time to that of a baseline, timed alternately.

A round times candidate, baseline, baseline, candidate, so that a steady change of the machine's speed cancels
in its ratio. The result is the median over the rounds, with its quartiles and a bootstrapped 95 % interval,
and the ratio of the fastest times: other work on a machine adds to some times and never shortens one.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap

Row = dict[str, Any]
Step = Callable[[], Any]
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_quick() -> bool:
    """Return True if few rounds are wanted, which show that a benchmark runs and not how long it takes."""
    return "GRADPOLICY_BENCH_QUICK" in os.environ


def wall_seconds(function: Step) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def device_seconds(function: Step, calls: int = 20) -> float:
    """Return the duration of a call on the available device.

    A GPU runs asynchronously, so many calls are timed until the last has ended.
    """
    if HERE.type == "cpu":
        return wall_seconds(function)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def paired_ratio(
    what: str,
    candidate: Step,
    baseline: Step,
    *,
    target: float | None = None,
    rounds: int = 15,
    warmup: int = 3,
    seconds: Callable[[Step], float] = wall_seconds,
) -> Row:
    """Return the time of a candidate relative to a baseline, as a row of a benchmark's table.

    Args:
        what: A description.
        candidate: The function to measure.
        baseline: The baseline.
        target: The largest ratio that is acceptable.
        rounds: The minimum number of timings of each; two timings make a round.
        warmup: The number of untimed runs of both before.
        seconds: A function that runs one of them and returns its duration.
    """
    if is_quick():
        rounds, warmup = 4, 1
    for _ in range(warmup):
        candidate()
        baseline()
    taken, against = [], []
    for _ in range((rounds + 1) // 2):
        taken.append(seconds(candidate))
        against += [seconds(baseline), seconds(baseline)]
        taken.append(seconds(candidate))
    ratios = [sum(taken[i : i + 2]) / sum(against[i : i + 2]) for i in range(0, len(taken), 2)]
    return {
        **time_row(what, ratios, taken, against, target),
        "fastest": _fastest(taken) / _fastest(against),
    }


def time_row(
    what: str,
    ratios: Sequence[float],
    taken: Sequence[float],
    against: Sequence[float],
    target: float | None = None,
) -> Row:
    """Return the row of the ratios of several rounds.

    ``ratio`` is their median, ``low`` and ``high`` are their quartiles, ``at_least`` and ``at_most`` the ends
    of the median's 95 % interval.

    Args:
        what: A description.
        ratios: The ratio of each round.
        taken: Seconds of the candidate.
        against: Seconds of the baseline.
        target: The largest ratio that is acceptable.
    """
    low, middle, high = statistics.quantiles(ratios, n=4)
    rng = np.random.default_rng(0)
    interval = bootstrap((ratios,), np.median, method="percentile", rng=rng).confidence_interval
    return {
        "what": what,
        "ratio": middle,
        "target": target,
        "unit": "time",
        "low": low,
        "high": high,
        "at_least": float(interval.low),
        "at_most": float(interval.high),
        "milliseconds": 1e3 * statistics.median(taken),
        "baseline_milliseconds": 1e3 * statistics.median(against),
    }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread in torch, so that threads waiting for each other do not hide small costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fastest(times: Sequence[float]) -> float:
    """Return the mean of the fastest fifth."""
    return statistics.mean(sorted(times)[: max(len(times) // 5, 1)])
