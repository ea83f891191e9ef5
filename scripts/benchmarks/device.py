"""Where benchmarks run, and how time is taken there.

A GPU works through what it was given while Python goes on. So a time is of many calls, up to when the last
has ended, and what Python takes is hidden as in training, unless the GPU has to wait for it.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import wall_seconds

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CALLS = 20
"""Calls to a timing on a GPU."""


def seconds(function: Callable[[], Any], calls: int = CALLS) -> float:
    """How long a call takes here."""
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
