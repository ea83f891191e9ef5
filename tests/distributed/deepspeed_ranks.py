"""Ranks that run DeepSpeed, on CPUs too: where it is not installed, these tests are skipped."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from process_pool import ProcessPool
from torch import Tensor, nn

NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessPool]:
    """Two processes joined by gloo."""
    with ProcessPool(2, "gloo") as pool:
        yield pool


@pytest.fixture(scope="module")
def gpu() -> Iterator[ProcessPool]:
    """One process with a GPU, in the environment that torchrun gives it."""
    with ProcessPool(1, "nccl") as pool:
        yield pool


def use_deepspeed_on_cpus() -> None:
    """Let DeepSpeed, in this process, take the CPU for its accelerator."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # What it would compile for the CPU takes minutes; gloo does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights, of which each rank may hold a part."""
    parameters = dict(model.named_parameters())
    whole: Any = nullcontext()
    if any(hasattr(parameter, "ds_id") for parameter in parameters.values()):
        from deepspeed.runtime.zero import GatheredParameters

        whole = GatheredParameters(list(parameters.values()))
    with whole:
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}
