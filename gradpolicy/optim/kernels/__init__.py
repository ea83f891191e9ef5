"""Kernels: operations on entries in memory, in C for CPUs, else in torch."""

from __future__ import annotations

import torch

from gradpolicy.optim.kernels import native
from gradpolicy.optim.kernels.reference import REFERENCE, EntryUpdate, Kernels

__all__ = ["EntryUpdate", "Kernels", "select"]


def select(device: torch.device, *dtypes: torch.dtype, rule_kernel: str | None = None) -> Kernels:
    """Return the C kernels on a CPU if they compile and support the dtypes, else those of torch.

    Args:
        device: The device of the entries.
        dtypes: Their types.
        rule_kernel: Name of the C body of an update; None if the operation is not an update.
    """
    on_cpu = device.type == "cpu"
    return native.NATIVE if on_cpu and native.supports(dtypes, rule_kernel) else REFERENCE
