"""Kernels: operations on entries in memory, in torch."""

from __future__ import annotations

import torch

from gradpolicy.optim.kernels.reference import REFERENCE, EntryUpdate, Kernels

__all__ = ["EntryUpdate", "Kernels", "select"]


def select(device: torch.device, *dtypes: torch.dtype) -> Kernels:
    """Return the kernels for a device."""
    return REFERENCE
