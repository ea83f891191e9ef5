"""Masks as small as they can be in a file: a bit for each flag, or positions where these take less."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

_BITS, _SHAPE = "packed_mask", "shape"
_SMALLEST = 64
"""A mask of fewer flags stays as it is."""
_SAME: dict[bytes, TensorWeakRef] = {}


def pack(flags: Tensor) -> Tensor:
    """Return flags as bits (uint8), or as positions (int32) where fewer than one in 32 is set.

    Equal flags give the same tensor as long as somebody holds it, and `torch.save` writes a tensor once.

    Args:
        flags: Bool, of any shape.

    Returns:
        A vector on the CPU, not to be written to; :func:`unpack` takes it back.

    Example:
        >>> pack(torch.tensor([True, False, True]))
        tensor([5], dtype=torch.uint8)
    """
    flat = flags.reshape(-1)
    if 32 * int(flat.count_nonzero()) < flat.numel() < 2**31:
        packed = flat.nonzero().view(-1).to("cpu", torch.int32)
    else:
        padded = torch.nn.functional.pad(flat.view(torch.uint8), (0, -flat.numel() % 8)).view(-1, 8)
        weights = (1 << torch.arange(8, device=flat.device)).to(torch.uint8)
        packed = (padded * weights).sum(1, dtype=torch.uint8).cpu()
    content = packed.numpy().data
    digest = hashlib.blake2b(content, key=f"{packed.dtype} {flat.numel()}".encode()).digest()
    # A plain weak reference may lead to a freed object, since a tensor can outlive its Python object.
    present = _SAME[digest]() if digest in _SAME else None
    if present is None:
        for dead in [key for key, reference in _SAME.items() if reference() is None]:
            del _SAME[dead]
        present, _SAME[digest] = packed, TensorWeakRef(packed)
    return present


def unpack(packed: Tensor, count: int) -> Tensor:
    """Return so many flags that :func:`pack` has packed (bool, 1-D, on the device of `packed`).

    Raises:
        IndexError: If a position is beyond the last flag.

    Example:
        >>> unpack(torch.tensor([5], dtype=torch.uint8), 3)
        tensor([ True, False,  True])
    """
    if packed.dtype != torch.uint8:
        flags = torch.zeros(count, dtype=torch.bool, device=packed.device)
        flags[packed.long()] = True
        return flags
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) >> shifts).bitwise_and_(1).view(-1)[:count].bool()


def pack_masks(state: Any) -> Any:
    """Return a state in which every bool tensor is packed; sharded and small ones stay."""
    if type(state) is Tensor and state.dtype == torch.bool and state.numel() >= _SMALLEST:
        return {_BITS: pack(state), _SHAPE: list(state.shape)}
    return _in_each(pack_masks, state)


def unpack_masks(state: Any) -> Any:
    """Return what :func:`pack_masks` was given."""
    if isinstance(state, Mapping) and state.keys() == {_BITS, _SHAPE}:
        return unpack(state[_BITS], prod(state[_SHAPE])).view(state[_SHAPE])
    return _in_each(unpack_masks, state)


def _in_each(change: Any, state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: change(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(change, state))
    return state
