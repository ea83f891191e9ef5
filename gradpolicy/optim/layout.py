"""The order of a parameter's entries in memory, and masks and values in that order.

Kernels work on flat vectors in memory order. Sharded tensors (DTensor), complex numbers and memory formats
such as channels_last are handled here and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.tensors.mask import as_tensor, check_mask
from gradpolicy.tensors.sharding import full_tensor, is_sharded, local_shard


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
        Replicate() if placement.is_shard() and _is_one(shape, parameter, placement.dim) else placement
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
    whole = full_tensor(mask)
    return whole[tuple(slice(size) for size in shape)]


def fitting_mask(mask: object, parameter: Tensor, name: str) -> Tensor:
    """Return a mask as a bool tensor with as many dimensions as the parameter.

    Raises:
        PolicyError: As `check_mask`, or if the parameter has no values.
    """
    if parameter.is_meta:
        raise PolicyError(f"{name}: the parameter lies on the meta device, where tensors have no values")
    tensor = as_tensor(check_mask(mask, parameter, name), parameter.shape, parameter.device)
    missing = parameter.dim() - tensor.dim()
    return tensor.reshape((1,) * missing + tuple(tensor.shape)) if missing else tensor


@dataclass(frozen=True)
class Layout:
    """The physical order of one parameter's (local) entries.

    Attributes:
        whole_shape: Shape of the whole parameter.
        shape: Local shape, with a last dimension of 2 for complex parameters.
        order: Dimensions from the outermost in memory to the innermost.
        plain: True if the parameter is not sharded, and its entries are real and lie in logical order.
    """

    whole_shape: torch.Size
    shape: tuple[int, ...]
    order: tuple[int, ...]
    plain: bool

    @classmethod
    def of(cls, parameter: Tensor) -> Layout:
        """Return the layout of a parameter."""
        real = _real(local_shard(parameter.detach()))
        order = order_in_memory(real)
        plain = order == sorted(order) and not parameter.is_complex() and not is_sharded(parameter)
        return cls(parameter.shape, tuple(real.shape), tuple(order), plain)

    @functools.cached_property
    def size(self) -> int:
        """Number of entries on this process; a complex one counts as two."""
        return prod(self.shape)

    @property
    def physical_shape(self) -> tuple[int, ...]:
        """The shape with its dimensions in memory order."""
        return tuple(self.shape[d] for d in self.order)

    def memory(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself if its entries are in memory order, else :meth:`flat`."""
        if self.plain and tensor.is_contiguous():
            return tensor
        return _real(local_shard(tensor.detach())).permute(self.order).reshape(-1).contiguous()

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the tensor's entries in memory order: a view if possible, else a copy."""
        return self.memory(tensor.detach()).view(-1)

    def shaped(self, flat: Tensor, parameter: Tensor) -> Tensor:
        """Return a flat vector as a tensor like the parameter: a view if possible, else a copy."""
        if self.plain:
            return flat.view(parameter.shape)
        shaped = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        _real(local_shard(shaped)).copy_(self._unflattened(flat))
        return shaped

    def write_back(self, flat: Tensor, tensor: Tensor) -> None:
        """Write a vector from `flat` or `memory` back to its tensor if it is a copy."""
        if self.plain and tensor.data_ptr() == flat.data_ptr():
            return
        target = _real(local_shard(tensor.detach()))
        if target.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
            target.copy_(self._unflattened(flat))

    def _unflattened(self, flat: Tensor, leading: int | None = None) -> Tensor:
        """Return a vector in its logical shape; with `leading`, later dimensions in memory are 1."""
        shape = self.physical_shape
        if leading is not None:
            shape = (*shape[:leading], *(1,) * (len(shape) - leading))
        inverse = sorted(range(len(self.order)), key=lambda position: self.order[position])
        return flat.view(shape).permute(inverse)

    def spread(self, values: Tensor, block: int) -> Tensor:
        """Return one value a block, in memory order, as a view of the logical shape, 1 within a block."""
        return self._unflattened(values, self._dimensions_outside(block))

    def blocks_of(self, mask: Tensor, parameter: Tensor) -> tuple[Tensor, int]:
        """Return a mask as one flag for each block of consecutive entries.

        Returns:
            The flags (bool, 1-D, in memory order), and the number of entries for each: all of them for a
            whole-tensor mask, a row's for a row mask, one for an entry mask.
        """
        one_each = self.plain and mask.shape == parameter.shape and mask.device == parameter.device
        if one_each and not is_sharded(mask):
            return mask.reshape(-1).contiguous(), 1
        own = local_mask(mask, parameter).to(local_shard(parameter).device)
        if parameter.is_complex():
            own = own.unsqueeze(-1)
        own = own.permute(self.order)
        physical = self.physical_shape
        leading = len(physical)
        while leading and own.shape[leading - 1] == 1:
            leading -= 1
        leads = physical[:leading]
        block = prod(physical[leading:])
        flags = own.reshape(own.shape[:leading]).expand(leads).reshape(-1).contiguous()
        return flags, block

    def logical(
        self, blocks: Tensor, block: int, parameter: Tensor, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return one value a block as a tensor that broadcasts to the parameter.

        Args:
            blocks: A value for each block, in memory order.
            block: Entries in a block.
            parameter: The parameter.
            shape: The result is cut to size 1 where this is 1; None: it is as coarse as the blocks.
        """
        if is_sharded(parameter):
            # Every rank must give its part of one tensor, however uniform that part is.
            shape = parameter.shape if shape is None else shape
        if self.size:
            value = self._unflattened(blocks, self._dimensions_outside(block))
        else:
            value = blocks.new_zeros(self.shape)
        if parameter.is_complex():
            value = value.select(-1, 0)
        if shape is None:
            return value
        sizes = list(local_shard(parameter).shape)
        for dim in range(value.dim()):
            if _is_one(shape, parameter, dim):
                sizes[dim] = 1
                value = value.narrow(dim, 0, 1) if value.shape[dim] > 1 else value
        return as_sharded(value.expand(sizes), parameter, shape)

    def _dimensions_outside(self, block: int) -> int:
        """Return the number of dimensions in memory outside a block of that many entries."""
        inside, leading = 1, len(self.order)
        while leading and (inside < block or self.physical_shape[leading - 1] == 1):
            leading -= 1
            inside *= self.physical_shape[leading]
        return leading


def order_in_memory(tensor: Tensor) -> list[int]:
    """Return the dimensions from the outermost in memory, of the largest stride, to the innermost."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _is_one(shape: Sequence[int], parameter: Tensor, dim: int) -> bool:
    """Return True if a mask of this shape has one value for all of a dimension."""
    return shape[dim] == 1 and parameter.shape[dim] > 1


def as_sharded(value: Tensor, parameter: Tensor, shape: Sequence[int]) -> Tensor:
    """Return local values as a tensor like the parameter: a DTensor if that is one.

    Args:
        value: This process's part.
        parameter: The parameter.
        shape: Shape of the whole tensor; 1 where one value is that of a whole dimension.
    """
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = _placements(parameter, shape)
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    size = torch.Size(shape)
    return DTensor.from_local(
        value.contiguous(), mesh, placements, run_check=False, shape=size, stride=stride
    )


def own_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a parameter's gradient for writing: a copy if its entries share memory, as expanded ones do."""
    if 0 in gradient.stride() and gradient.numel() > 1:
        parameter.grad = gradient = gradient.clone(memory_format=torch.contiguous_format)
    return gradient
