"""Masks and values in the shape of a parameter and of its shards.

What moves are the real numbers of this process; complex parameters have a last dimension of 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.tensors.mask import as_tensor, check_mask
from gradpolicy.tensors.sharding import full_tensor, is_sharded, local_shard

CHUNK = 1 << 18
"""Entries that a CPU changes at a time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def local_mask(mask: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's part of a mask, sharding a plain one like the parameter without communication."""
    if is_sharded(mask) or not is_sharded(parameter):
        return local_shard(mask)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = _placements(parameter, mask.shape)
    return distribute_tensor(mask.to(parameter.device), mesh, placements, src_data_rank=None).to_local()


def _placements(parameter: Tensor, shape: Sequence[int]) -> tuple[Any, list[Any]]:
    """Return a sharded parameter's mesh, and the placements of a mask of a shape on it."""
    from torch.distributed.tensor import Replicate

    sharded: Any = parameter
    return sharded.device_mesh, [
        Replicate()
        # One value is that of all of the dimension.
        if placement.is_shard() and shape[placement.dim] == 1 < parameter.shape[placement.dim]
        else placement
        for placement in sharded.placements
    ]


def coarse_mask(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the coarser mask from which a mask with a flag per entry was made.

    Args:
        mask: Bool, of the parameter's shape; if it is sharded, every process must take part.
        shape: Shape of the mask as it was set.
    """
    if tuple(shape) == tuple(mask.shape):
        return mask
    full = full_tensor(mask)
    return full[tuple(slice(size) for size in shape)]


def fitting_mask(mask: object, parameter: Tensor, name: str) -> Tensor:
    """Return a mask, also a seeded one, as a bool tensor with as many dimensions as the parameter.

    Raises:
        PolicyError: As `check_mask`, or if the parameter has no values.
    """
    if parameter.is_meta:
        raise PolicyError(f"{name}: the parameter is on the meta device, where tensors have no values")
    if hasattr(mask, "materialize"):
        mask = mask.materialize(parameter.shape, parameter.device)
    tensor = as_tensor(check_mask(mask, parameter, name), parameter.shape, parameter.device)
    missing = parameter.dim() - tensor.dim()
    return tensor.reshape((1,) * missing + tuple(tensor.shape)) if missing else tensor


def local_entries(tensor: Tensor) -> Tensor:
    """Return this process's entries as real numbers; writing to them writes to the tensor."""
    # The shard of the parameter itself would be a view that autograd follows.
    local = local_shard(tensor.detach() if tensor.requires_grad else tensor)
    return torch.view_as_real(local) if local.is_complex() else local


def as_logical(
    values: Tensor, parameter: Tensor, entries: Sequence[int], shape: Sequence[int] | None = None
) -> Tensor:
    """Return this process's values as a tensor that broadcasts to the parameter: a DTensor if that is one.

    Args:
        values: In dimensions of this process's entries.
        parameter: The parameter.
        entries: The shape of these.
        shape: The result has size 1 where this has, and is full in other dimensions; None: it is as coarse as
            the values, and full if the parameter is sharded.
    """
    values, sharded = values[..., 0] if parameter.is_complex() else values, is_sharded(parameter)
    if shape is None and not sharded:
        return values
    shape = tuple(parameter.shape if shape is None else shape)
    ones = [size == 1 != full for size, full in zip(shape, parameter.shape, strict=True)]
    values = values[tuple(slice(1) if one else slice(None) for one in ones)]
    values = values.expand([1 if one else size for one, size in zip(ones, entries, strict=False)])
    if not sharded:
        return values
    from torch.distributed.tensor import DTensor

    mesh, placements = _placements(parameter, shape)
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    size = torch.Size(shape)
    return DTensor.from_local(
        values.contiguous(), mesh, placements, run_check=False, shape=size, stride=stride
    )


# --- large tensors


def in_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors in flat parts that stay in a processor's cache; as they are if their shapes differ."""
    entries = max(map(Tensor.numel, tensors))
    shape = next(each.shape for each in tensors if each.numel() == entries)
    is_small = entries <= CHUNK or tensors[0].device.type != "cpu"
    if is_small or not all(
        each.numel() == 1 or (each.shape == shape and each.is_contiguous()) for each in tensors
    ):
        yield tensors
        return
    flat = [each.view(-1) for each in tensors]
    for start in range(0, entries, CHUNK):
        yield tuple(each if each.numel() == 1 else each[start : start + CHUNK] for each in flat)


def fill_frozen(values: Tensor, mask: Tensor, number: float) -> None:
    """Set entries that a mask freezes to a number, in place; NaN too."""
    if number:
        values.masked_fill_(~mask, number)
        return
    integers = _INTEGERS[values.element_size()]
    for part, active in in_parts(values.view(integers), mask):
        # All bits, or none: PyTorch fills by a mask in five times the time.
        part &= (-active.view(torch.int8)).to(integers)
