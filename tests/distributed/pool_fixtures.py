"""Fixtures of processes that stay: each case is a function sent to all, since starting them takes seconds."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from process_pool import ProcessPool


def backends(ranks: int) -> list[Any]:
    """The same tests on the CPU, joined by gloo, and on so many GPUs, joined by nccl."""
    lacking = torch.cuda.device_count() < ranks
    marks = [pytest.mark.gpu, pytest.mark.skipif(lacking, reason=f"needs {ranks} CUDA devices")]
    return ["gloo", pytest.param("nccl", marks=marks)]


@pytest.fixture(scope="session", params=backends(2))
def pair(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    """Two processes joined by a process group."""
    with ProcessPool(2, request.param) as pool:
        yield pool


@pytest.fixture(scope="session", params=backends(4))
def pools(request: pytest.FixtureRequest) -> Iterator[dict[int, ProcessPool]]:
    """One, two and four processes, each joined by a process group."""
    with ExitStack() as stack:
        yield {size: stack.enter_context(ProcessPool(size, request.param)) for size in (1, 2, 4)}
