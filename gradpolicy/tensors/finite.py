"""Checks that numbers are finite, in one pass without copies."""

from collections.abc import Iterable

import torch
from torch import Tensor


def bounds(tensor: Tensor) -> Tensor:
    """Return the smallest and the largest number of a tensor; both are NaN where any is.

    Args:
        tensor: A tensor of any floating or complex dtype and any layout, with at least one entry.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    dense = real.to_dense() if real.layout is not torch.strided else real
    # aminmax does not support 1-byte dtypes. On a CPU isfinite().all() takes twenty times as long.
    return torch.stack(torch.aminmax((dense.float() if dense.itemsize == 1 else dense).detach()))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if no entry of any tensor is infinite or NaN.

    Args:
        tensors: Tensors of floating or complex dtypes on any devices. Synchronises once per device and dtype.

    Example:
        >>> all_finite([torch.zeros(2), torch.tensor([1.0, torch.nan])])
        False
    """
    ends: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            both = bounds(tensor)
            ends.setdefault((both.device, both.dtype), []).append(both)
    return all(bool(torch.stack(each).isfinite().all()) for each in ends.values())
