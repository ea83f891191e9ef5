"""Packed masks: a bit per flag, or positions if these take less memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

_BITS, _SHAPE = "packed_mask", "shape"
_SMALLEST = 64
"""A mask of fewer flags stays as it is."""
_SAME: dict[bytes, TensorWeakRef] = {}


def pack_bits(flags: Tensor) -> Tensor:
    """Return a bit for each flag, padded with 0 to words of 64 bits (uint8, on the flags' device)."""
    flags = flags.reshape(-1).view(torch.uint8)
    if flags.device.type == "cpu":
        packed = np.packbits(flags.numpy(), bitorder="little")
        return torch.from_numpy(np.pad(packed, (0, -len(packed) % 8)))
    padded = torch.nn.functional.pad(flags, (0, -flags.numel() % 64)).view(-1, 8)
    weights = (1 << torch.arange(8, device=flags.device)).to(torch.uint8)
    return (padded * weights).sum(1, dtype=torch.uint8)


def pack(flags: Tensor) -> Tensor:
    """Return flags as bits (uint8), or as positions (int32) where fewer than one in 32 is set.

    Args:
        flags: Bool, of any shape.

    Returns:
        A vector on the device of the flags, for :func:`unpack`.

    Example:
        >>> pack(torch.arange(100) == 7)
        tensor([7], dtype=torch.int32)
    """
    if 32 * int(flags.count_nonzero()) < flags.numel() < 2**31:
        return flags.reshape(-1).nonzero().view(-1).to(torch.int32)
    return pack_bits(flags)


def unpack(packed: Tensor, count: int) -> Tensor:
    """Return flags that :func:`pack` has packed (bool, 1-D, on the device of `packed`).

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


def written_once(packed: Tensor) -> Tensor:
    """Return packed flags on the CPU, the same tensor for equal flags, so that `torch.save` writes it once.

    Returns:
        A tensor that must not be modified.
    """
    packed = packed.cpu()
    digest = hashlib.blake2b(packed.numpy().data, key=str(packed.dtype).encode()).digest()
    # Not a plain weak reference, since a tensor can outlive its Python object.
    present = _SAME[digest]() if digest in _SAME else None
    if present is None:
        for dead in [key for key, reference in _SAME.items() if reference() is None]:
            del _SAME[dead]
        present, _SAME[digest] = packed, TensorWeakRef(packed)
    return present


def pack_masks(state: Any) -> Any:
    """Return a state with its bool tensors packed, except for sharded and small ones."""
    if type(state) is Tensor and state.dtype == torch.bool and state.numel() >= _SMALLEST:
        return {_BITS: written_once(pack(state)), _SHAPE: list(state.shape)}
    return _in_each(pack_masks, state)


def unpack_masks(state: Any) -> Any:
    """Return the state from the result of :func:`pack_masks`."""
    if isinstance(state, Mapping) and state.keys() == {_BITS, _SHAPE}:
        return unpack(state[_BITS], prod(state[_SHAPE])).view(state[_SHAPE])
    return _in_each(unpack_masks, state)


def _in_each(change: Any, state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: change(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(change, state))
    return state
