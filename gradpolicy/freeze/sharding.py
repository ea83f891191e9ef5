"""The few things that differ where a tensor is sharded over processes (a DTensor).

A decision about masks is made on whole tensors, the same on every process; what it needs is gathered then.
"""

from typing import Any

from torch import Tensor


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
