"""Masks of any form, operations on them, and their packed form.

A mask is ``True`` or ``False`` for the tensor, a bool tensor that broadcasts to the parameter
(``(n, 1, …)`` for rows), or a :class:`RandomMask`. True = this entry trains. Packed, it takes a bit per flag,
or positions if these take less memory.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from gradpolicy.errors import PolicyError
from gradpolicy.tensors.seeded import RandomMask
from gradpolicy.tensors.sharding import full_tensor

Mask = bool | Tensor | RandomMask
_BITS, _SHAPE = "packed_mask", "shape"
_SMALLEST = 64
"""A mask of fewer flags is not packed in a state."""


def check_mask(mask: object, parameter: Tensor, name: str) -> Mask:
    """Check that a mask fits a parameter.

    Args:
        mask: The given mask.
        parameter: The parameter; it may be on the meta device.
        name: Its name in messages.

    Returns:
        The mask as it was given.

    Raises:
        PolicyError: If it is no mask, is not bool or dense, has no values, or does not broadcast.
    """
    if isinstance(mask, bool | RandomMask):
        return mask
    if not isinstance(mask, Tensor):
        given = reprlib.repr(mask)
        raise PolicyError(f"mask of {name}: expected True, False, a bool tensor or a RandomMask, got {given}")
    if mask.dtype != torch.bool:
        kind = str(mask.dtype).removeprefix("torch.")
        raise PolicyError(f"mask of {name}: expected a bool tensor (True = this entry trains), got {kind}")
    if mask.layout != torch.strided or mask.is_nested:
        given = "a nested one" if mask.is_nested else f"{mask.layout}; use mask.to_dense()"
        raise PolicyError(f"mask of {name}: expected a dense tensor, got {given}")
    if mask.is_meta and not parameter.is_meta:
        raise PolicyError(f"mask of {name}: the mask is on the meta device, where tensors have no values")
    shape = tuple(parameter.shape)
    padded = (1,) * (len(shape) - mask.dim()) + tuple(mask.shape)
    fits = len(padded) == len(shape) and all(
        size in (1, full) for size, full in zip(padded, shape, strict=True)
    )
    if not fits:
        raise PolicyError(
            f"mask of {name}: shape {tuple(mask.shape)} does not broadcast to the parameter's {shape}; give "
            f"{shape} for entries, {(*shape[:1], *(1,) * (len(shape) - 1))} for rows, () for the tensor"
        )
    return mask


def as_tensor(mask: Mask, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return the mask as a bool tensor that broadcasts to the shape."""
    if isinstance(mask, RandomMask):
        return mask.materialize(shape, device)
    if isinstance(mask, bool):
        return torch.full((1,) * len(shape), mask, device=device)
    return mask.to(device)


def intersect(first: Mask, second: Mask, shape: Sequence[int], device: torch.device | str = "cpu") -> Mask:
    """Return the intersection of two masks, in the cheapest form."""
    if isinstance(first, bool):
        return second if first else False
    if isinstance(second, bool):
        return first if second else False
    if first is second or (isinstance(first, RandomMask) and first == second):
        return first
    return as_tensor(first, shape, device) & as_tensor(second, shape, device)


def unite(first: Mask, second: Mask, shape: Sequence[int], device: torch.device | str = "cpu") -> Mask:
    """Return the union of two masks, in the cheapest form."""
    if isinstance(first, bool):
        return True if first else second
    if isinstance(second, bool):
        return True if second else first
    return as_tensor(first, shape, device) | as_tensor(second, shape, device)


def active_share(mask: Mask) -> float:
    """Return the share of entries that train under a mask; the expected share of a random mask."""
    if isinstance(mask, Tensor):
        return 1.0 if mask.is_meta else mask.float().mean().item()
    return mask.density if isinstance(mask, RandomMask) else float(mask)


def same_mask(first: Mask | None, second: Mask | None) -> bool:
    """Return True if two masks are known to be equal without a comparison of entries."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return first is second
    return type(first) is type(second) and first == second


def mask_to_state(mask: Mask) -> bool | Tensor | dict[str, Any]:
    """Return a mask in a form that loads under ``weights_only=True``: a seeded one as its numbers."""
    if isinstance(mask, RandomMask):
        return asdict(mask)
    return full_tensor(mask) if isinstance(mask, Tensor) else mask


def mask_from_state(state: bool | Tensor | Mapping[str, Any], device: torch.device | str = "cpu") -> Mask:
    """Return a mask from the result of :func:`mask_to_state`."""
    if isinstance(state, Mapping):
        return RandomMask(**state)
    return state.to(device) if isinstance(state, Tensor) else state


# --- packed masks


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
    eights = functional.pad(flags.reshape(-1).view(torch.uint8), (0, -flags.numel() % 8)).view(torch.int64)
    # The product has the lowest bits of the eight bytes of a number in its highest byte.
    return ((eights * 0x0102040810204080) >> 56).to(torch.uint8)


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


def pack_masks(state: Any) -> Any:
    """Return a state with its bool tensors packed, except for sharded and small ones."""

    def packed(value: Any) -> Any:
        if type(value) is Tensor and value.dtype == torch.bool and value.numel() >= _SMALLEST:
            return {_BITS: pack(value).cpu(), _SHAPE: list(value.shape)}
        return value

    return tree_map(packed, state)


def unpack_masks(state: Any) -> Any:
    """Return the state from the result of :func:`pack_masks`."""

    def is_packed(value: Any) -> bool:
        return isinstance(value, Mapping) and value.keys() == {_BITS, _SHAPE}

    def unpacked(value: Any) -> Any:
        if not is_packed(value):
            return value
        return unpack(value[_BITS], math.prod(value[_SHAPE])).view(value[_SHAPE])

    return tree_map(unpacked, state, is_leaf=is_packed)
