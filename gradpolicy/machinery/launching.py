"""Triton kernels: loaded when a GPU is first met, compiled at their first use, never a condition for running.

Where Triton is missing, or cannot compile for the device, torch operations do the work, which is said once.
"""

import contextlib
import functools
import importlib
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DEVICES = {"cuda", "xpu"}
"""Kinds of device whose builds of torch bring Triton."""
_refused: set[torch.device] = set()


@functools.cache
def available() -> bool:
    """Whether there is Triton; one warning where there is not."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        _say(f"Triton cannot be imported: {error}")
        return False
    return True


def module(name: str) -> ModuleType | None:
    """A module of kernels; None where there is no Triton."""
    return importlib.import_module(name) if available() else None


def _say(reason: str) -> None:
    warnings.warn(
        f"gradpolicy: masks on the GPU are worked on by plain torch operations ({reason[:300]})", stacklevel=2
    )


def serve(*tensors: Tensor) -> bool:
    """Whether kernels take these tensors."""
    device = tensors[0].device
    if device.type not in DEVICES or device in _refused or not available():
        return False
    return all(tensor.is_contiguous() and tensor.device == device for tensor in tensors)


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any) -> bool:
    """Run a kernel; False, and one warning, where it cannot be compiled for the device."""
    if not programs:
        return True
    try:
        with _current(device):
            kernel[(programs,)](*arguments, **constants)
    except Exception as error:  # compilers fail in many ways, before anything is written
        _refused.add(device)
        _say(f"{type(error).__name__}: {error}")
        return False
    return True


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within, kernels are launched on this device."""
    if device.type == "cpu":  # Triton's interpreter
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return guard


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A small CPU tensor on the device, without waiting for the work that it has."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)
