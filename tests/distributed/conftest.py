"""Two processes that stay: each case is a function sent to both, since starting them takes seconds."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from process_pool import ProcessPool


@pytest.fixture(scope="session")
def pair() -> Iterator[ProcessPool]:
    """Two CPU processes joined by gloo."""
    with ProcessPool(2, "gloo") as pool:
        yield pool


@pytest.fixture(scope="session")
def gpus() -> Iterator[ProcessPool]:
    """As many processes as there are GPUs, joined by nccl."""
    with ProcessPool(torch.cuda.device_count(), "nccl") as pool:
        yield pool
