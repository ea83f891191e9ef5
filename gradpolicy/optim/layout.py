"""How one parameter lies in memory: logical tensors to flat physical vectors and back.

Everything below works on flat vectors in memory order. Sharded tensors (DTensor), complex numbers and
memory formats such as channels_last are handled here and nowhere else.
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
from gradpolicy.tensors.sharding import is_sharded, local_shard


def local_mask(mask: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of a mask. A plain mask is cut as the parameter is, without communication."""
    if is_sharded(mask) or not is_sharded(parameter):
        return local_shard(mask)
    from torch.distributed.tensor import Replicate, distribute_tensor

    sharded: Any = parameter
    placements = [
        Replicate() if placement.is_shard() and _is_one(mask.shape, parameter, placement.dim) else placement
        for placement in sharded.placements
    ]
    whole = mask.to(parameter.device)
    return distribute_tensor(whole, sharded.device_mesh, placements, src_data_rank=None).to_local()


def coarse_mask(mask: Tensor, parameter: Tensor, shape: Sequence[int]) -> Tensor:
    """The mask of a shape with ones, of which a mask of each entry came.

    Args:
        mask: bool, the parameter's shape; as sharded as the parameter, or plain.
        parameter: what it belongs to; of a sharded one every process must take part.
        shape: shape of the mask as it was set.
    """
    if is_sharded(mask) and _hidden_from_some(parameter, shape):
        sharded: Any = mask
        mask = sharded.full_tensor()
    own = local_shard(mask)
    for dim in range(len(shape)):
        own = own.narrow(dim, 0, 1) if _is_one(shape, parameter, dim) and own.shape[dim] > 1 else own
    return as_sharded(own, parameter, shape) if is_sharded(mask) else own


def _hidden_from_some(parameter: Tensor, shape: Sequence[int]) -> bool:
    """Whether a process without entries may need a value of a mask that only those of others tell."""
    sharded: Any = parameter
    split = [
        (placement.dim, ranks)
        for placement, ranks in zip(sharded.placements, sharded.device_mesh.shape, strict=True)
        if placement.is_shard()
    ]
    ranks = prod(count for _, count in split)
    # ceil(size / ranks) entries each: up to this size the last processes may be left with none.
    return any(
        _is_one(shape, parameter, dim) and parameter.shape[dim] <= ranks * (ranks - 1) for dim, _ in split
    )


def fitting_mask(mask: object, parameter: Tensor, name: str) -> Tensor:
    """A mask as a bool tensor with as many dimensions as the parameter.

    Raises:
        PolicyError: see `check_mask`; or the parameter has no values.
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
        shape: local shape, with a last dimension of 2 for complex parameters.
        order: dimensions from the outermost in memory to the innermost.
        plain: whether the parameter is not sharded, and its entries are real and lie in logical order.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    plain: bool

    @classmethod
    def of(cls, parameter: Tensor) -> Layout:
        """Reads the layout off a parameter."""
        real = _real(local_shard(parameter.detach()))
        order = sorted(range(real.dim()), key=lambda d: real.stride(d), reverse=True)
        plain = order == sorted(order) and not parameter.is_complex() and not is_sharded(parameter)
        return cls(tuple(real.shape), tuple(order), plain)

    @functools.cached_property
    def size(self) -> int:
        """Number of (real, local) entries."""
        return prod(self.shape)

    @property
    def physical_shape(self) -> tuple[int, ...]:
        """The shape with its dimensions in memory order."""
        return tuple(self.shape[d] for d in self.order)

    def flat(self, tensor: Tensor) -> Tensor:
        """The tensor's entries in memory order: a view where it lies that way, else a copy."""
        if self.lies_plainly(tensor):
            return tensor.detach().view(-1)
        return _real(local_shard(tensor.detach())).permute(self.order).reshape(-1).contiguous()

    def lies_plainly(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is what `flat` would give."""
        return self.plain and tensor.is_contiguous()

    def shaped(self, flat: Tensor, parameter: Tensor) -> Tensor:
        """A flat vector as a tensor like the parameter, of which it becomes the memory where that can be."""
        if self.plain:
            return flat.view(parameter.shape)
        shaped = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        _real(local_shard(shaped)).copy_(self.unflatten(flat))
        return shaped

    def write_back(self, flat: Tensor, tensor: Tensor) -> None:
        """Puts a flat vector from `flat` back where that was a copy."""
        if self.plain and tensor.data_ptr() == flat.data_ptr():
            return
        target = _real(local_shard(tensor.detach()))
        if target.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
            target.copy_(self.unflatten(flat))

    def unflatten(self, flat: Tensor, leading: int | None = None) -> Tensor:
        """Gives a flat vector its logical shape back; with `leading`, later physical dimensions are 1."""
        shape = self.physical_shape
        if leading is not None:
            shape = (*shape[:leading], *(1,) * (len(shape) - leading))
        inverse = sorted(range(len(self.order)), key=lambda position: self.order[position])
        return flat.view(shape).permute(inverse)

    def blocks_of(self, mask: Tensor, parameter: Tensor) -> tuple[Tensor, int]:
        """A mask as one flag for each block of consecutive entries.

        Returns:
            The flags (bool, 1-D, in memory order) and how many entries each governs: all of them for a
            whole-tensor mask, a row's worth for a row mask, one for an entry mask.
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

    def leading_of(self, block: int) -> int:
        """How many physical dimensions lie outside a block of that many entries."""
        inside, leading = 1, len(self.order)
        while leading and (inside < block or self.physical_shape[leading - 1] == 1):
            leading -= 1
            inside *= self.physical_shape[leading]
        return leading

    def logical(
        self, blocks: Tensor, block: int, parameter: Tensor, shape: Sequence[int] | None = None
    ) -> Tensor:
        """One value a block as a tensor broadcastable to the parameter, cut to `shape` where that is 1."""
        if is_sharded(parameter):
            # Every rank must give its part of one tensor, however uniform that part is.
            shape = parameter.shape if shape is None else shape
        value = self._spread(blocks, block)
        if parameter.is_complex():
            value = value.select(-1, 0)
        if shape is None:
            return value
        own = local_shard(parameter).shape
        for dim in range(value.dim()):
            if _is_one(shape, parameter, dim) and value.shape[dim] > 1:
                value = value.narrow(dim, 0, 1)
        sizes = [1 if _is_one(shape, parameter, dim) else size for dim, size in enumerate(own)]
        return as_sharded(value.expand(sizes), parameter, shape)

    def _spread(self, blocks: Tensor, block: int) -> Tensor:
        if not self.size:
            return blocks.new_zeros(self.shape)
        return self.unflatten(blocks, self.leading_of(block))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _is_one(shape: Sequence[int], parameter: Tensor, dim: int) -> bool:
    """Whether a mask of this shape has one value for all of a dimension."""
    return shape[dim] == 1 and parameter.shape[dim] > 1


def has_one_value(shape: Sequence[int], parameter: Tensor) -> bool:
    """Whether a mask of this shape is one flag, which every process of a sharded parameter has."""
    placements: Any = getattr(parameter, "placements", ())
    split = [placement.dim for placement in placements if placement.is_shard()]
    return prod(shape) == 1 and all(_is_one(shape, parameter, dim) for dim in split)


def as_sharded(value: Tensor, parameter: Tensor, shape: Sequence[int]) -> Tensor:
    """Local values as a tensor like the parameter: a DTensor where that is one.

    Args:
        value: this process's part.
        parameter: what it belongs to.
        shape: shape of the whole; 1 where one value stands for a dimension.
    """
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    sharded: Any = parameter
    placements = [
        Replicate() if placement.is_shard() and _is_one(shape, parameter, placement.dim) else placement
        for placement in sharded.placements
    ]
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        value.contiguous(),
        sharded.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def own_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A parameter's gradient, to be written to: a copy where entries share memory, as expanded ones do."""
    if 0 in gradient.stride() and gradient.numel() > 1:
        parameter.grad = gradient = gradient.clone(memory_format=torch.contiguous_format)
    return gradient
