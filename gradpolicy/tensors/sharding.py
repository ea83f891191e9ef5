"""Operations that differ for tensors that are sharded over processes (DTensor).

Decisions about masks are made on full tensors, gathered for it, so that every process decides the same.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor, without importing ``torch.distributed.tensor``."""
    return hasattr(tensor, "to_local")


def is_composed(tensor: Tensor) -> bool:
    """Return True for a tensor that is made up of others, such as codes and scales, and not sharded."""
    return is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor)


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors of this process that make up a tensor, most often one."""
    local: Any = local_shard(tensor)
    return [getattr(local, name) for name in local.__tensor_flatten__()[0]] if is_composed(local) else [local]


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered from all processes if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard; writing to it writes to the tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a full tensor on the device and with the sharding of another of the same shape."""
    tensor = tensor.to(other.device)
    if not is_sharded(other):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = other
    # Every process has the full tensor already, so there is no communication.
    return distribute_tensor(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)


def mean_of_ranks(value: float) -> float:
    """Return the mean of a value over all processes; with one process, the value."""
    device = "cuda" if _has_processes() and torch.distributed.get_backend() == "nccl" else "cpu"
    counted = torch.tensor([value, 1.0], dtype=torch.float64, device=device)
    total, count = sum_over_processes(counted).tolist()
    return float(total / count)


def write_entries(tensor: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write values at flat indices of the full tensor, which all processes do together.

    Args:
        tensor: The tensor to write to.
        indices: Flat indices into the full tensor, ascending.
        values: One value per index.
    """
    full = full_tensor(tensor)
    full[torch.unravel_index(indices, full.shape)] = values.to(full.dtype)
    if is_sharded(tensor):
        local_shard(tensor).copy_(local_shard(shard_like(full, tensor)))


def zero_outside(tensor: Tensor, mask: Tensor) -> None:
    """Set entries outside a mask to zero; each process does so in its shard."""
    local = local_shard(tensor)
    torch.where(local_shard(shard_like(mask, tensor)), local, local.new_zeros(()), out=local)


def sum_over_processes(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes; with one process, the tensor itself."""
    if not _has_processes():
        return tensor
    total = tensor.clone()
    torch.distributed.all_reduce(total)
    return total


def _has_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


# --- finite numbers


def bounds(tensor: Tensor) -> Tensor:
    """Return the smallest and the largest number of a tensor; both are NaN where any is.

    Args:
        tensor: A tensor of any floating or complex dtype and any layout, with at least one entry.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    dense = real.to_dense() if real.layout is not torch.strided else real
    # aminmax does not support 1-byte dtypes. On a CPU isfinite().all() takes twenty times as long.
    return torch.stack(torch.aminmax((dense.float() if dense.itemsize == 1 else dense).detach()))


def finite_everywhere(tensors: Iterable[Tensor]) -> bool:
    """Return True if no entry of any tensor is infinite or NaN; all processes return the same.

    Args:
        tensors: Tensors of floating or complex dtypes on any devices. Synchronises once per device and dtype.

    Example:
        >>> finite_everywhere([torch.zeros(2), torch.tensor([1.0, torch.nan])])
        False
    """
    ends: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if is_sharded(tensor):
            # Every process gets the sum over all shards, so that they agree; float64 does not overflow.
            tensor = full_tensor(tensor.double().abs().sum())
        if tensor.numel():
            both = bounds(tensor)
            ends.setdefault((both.device, both.dtype), []).append(both)
    return all(bool(torch.stack(each).isfinite().all()) for each in ends.values())
