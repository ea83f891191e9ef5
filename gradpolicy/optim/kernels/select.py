"""The one place that chooses who carries out operations on entries."""

from __future__ import annotations

import torch

from gradpolicy.optim.kernels import native
from gradpolicy.optim.kernels.interface import Kernels
from gradpolicy.optim.kernels.reference import REFERENCE


def select(device: torch.device, *dtypes: torch.dtype, rule_kernel: str | None = None) -> Kernels:
    """The C kernels on a CPU where they can be had and know the types, else torch.

    Args:
        device: where the entries are.
        dtypes: their types.
        rule_kernel: the C body of the update that is wanted; None: another operation is.
    """
    on_cpu = device.type == "cpu"
    if on_cpu and native.supports(dtypes, rule_kernel):
        return native.NATIVE
    return REFERENCE
