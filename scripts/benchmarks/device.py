"""Where benchmarks run, how time is taken there, and how fast its memory is.

A GPU works through what it was given while Python goes on. So a time is of many calls, up to when the last
has ended, and what Python takes is hidden as in training, unless the GPU has to wait for it.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CALLS = 20
"""Calls to a timing on a GPU."""
COPIED = 1 << 30
"""Bytes that are copied to see how fast memory is: far more than a cache holds."""


def seconds(function: Callable[[], Any]) -> float:
    """How long a call takes here."""
    if HERE.type == "cpu":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(CALLS):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / CALLS


def memory() -> int:
    """Bytes of memory of the GPU; 0 where there is none."""
    return torch.cuda.get_device_properties(HERE).total_memory if HERE.type == "cuda" else 0


@functools.cache
def copy_bandwidth() -> float:
    """Bytes a second that a copy reads and writes here."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=HERE)
    target = torch.zeros_like(source)
    target.copy_(source)
    return 2 * COPIED / statistics.median(seconds(lambda: target.copy_(source)) for _ in range(9))


def copy_share(moved: float, milliseconds: float) -> float:
    """What share of the copy's bandwidth that is.

    Args:
        moved: Bytes that had to be read or written.
        milliseconds: How long it took.
    """
    return moved / (milliseconds / 1e3) / copy_bandwidth()
