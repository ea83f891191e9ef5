"""The few things that differ where a tensor is sharded over processes (a DTensor).

A decision about masks is made on whole tensors, the same on every process; what it needs is gathered then.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradpolicy.finite import all_finite


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all processes where it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """The part that this process holds; writing to it writes to the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor laid out as another one of the same shape: on its device, and cut as it is."""
    tensor = tensor.to(other.device)
    if not hasattr(other, "to_local"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = other
    # Every process has the whole tensor already: nothing is sent.
    return distribute_tensor(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)


def finite_everywhere(tensors: Iterable[Tensor]) -> bool:
    """Whether every entry of every tensor is finite, on all processes alike."""
    tensors = list(tensors)
    plain = [tensor for tensor in tensors if not hasattr(tensor, "to_local")]
    # A sum over all shards is known to all processes, so that they agree; in float64 it cannot overflow.
    sums = [whole(tensor.double().abs().sum()) for tensor in tensors if hasattr(tensor, "to_local")]
    return all_finite([*plain, *sums])


def write_at(tensor: Tensor, places: Tensor, values: Tensor) -> None:
    """Writes values at flat places of the whole tensor, each process those of its part.

    Args:
        tensor: What is written to.
        places: Flat indices into the whole tensor, ascending.
        values: One a place.
    """
    values = values.to(tensor.dtype)
    if not hasattr(tensor, "to_local"):
        tensor[torch.unravel_index(places, tensor.shape)] = values
        return
    written = torch.zeros(tensor.shape, dtype=torch.bool, device=places.device).flatten()
    written[places] = True
    content = torch.zeros(written.shape, dtype=values.dtype, device=places.device)
    content[places] = values
    marks = local(like(written.reshape(tensor.shape), tensor))
    own = local(tensor)
    own.copy_(torch.where(marks, local(like(content.reshape(tensor.shape), tensor)), own))
