"""What a mask may be, and the few things one does with masks whatever their form.

A mask is ``True`` or ``False`` for the whole tensor, a bool tensor that broadcasts to the parameter
(``(n, 1, …)`` for rows), or a :class:`RandomMask`. True = this entry trains.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, shown
from gradpolicy.tensors.seeded_mask import RandomMask, recipe_from_state
from gradpolicy.tensors.sharding import whole

Mask = bool | Tensor | RandomMask


def check_mask(name: str, mask: object, shape: Sequence[int], device: torch.device | None = None) -> Mask:
    """Takes a mask that fits a parameter.

    Args:
        name: The parameter's name, for the message.
        mask: What a mask source gave.
        shape: The parameter's shape.
        device: Where the parameter lies, where that is known.

    Raises:
        PolicyError: If it is no mask, not bool, not dense, has no values or does not broadcast to the shape.
    """
    if isinstance(mask, bool | RandomMask):
        return mask
    if not isinstance(mask, Tensor):
        given = reprlib.repr(mask)
        raise PolicyError(
            f"mask of {shown(name)}: must be True, False, a bool tensor or a RandomMask, got {given}"
        )
    if mask.dtype != torch.bool:
        raise PolicyError(
            f"mask of {shown(name)}: must be bool, got {str(mask.dtype).removeprefix('torch.')}"
        )
    if mask.layout != torch.strided:
        raise PolicyError(f"mask of {shown(name)}: must be dense; use mask.to_dense()")
    if mask.is_meta and device is not None and device.type != "meta":
        raise PolicyError(f"mask of {shown(name)}: lies on meta, where there are no values")
    padded = (1,) * (len(shape) - mask.dim()) + tuple(mask.shape)
    fits = len(padded) == len(shape) and all(
        size in (1, full) for size, full in zip(padded, shape, strict=True)
    )
    if not fits:
        raise PolicyError(
            f"mask of {shown(name)}: shape {tuple(mask.shape)} does not fit the parameter's {tuple(shape)}"
        )
    return mask


def as_tensor(mask: Mask, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """The mask as a bool tensor that broadcasts to the shape."""
    if isinstance(mask, RandomMask):
        return mask.materialize(shape, device)
    if isinstance(mask, bool):
        return torch.full((1,) * len(shape), mask, device=device)
    return mask.to(device)


def intersect(first: Mask, second: Mask, shape: Sequence[int], device: torch.device | str = "cpu") -> Mask:
    """Active where both masks are; in the cheapest form that says it."""
    if isinstance(first, bool):
        return second if first else False
    if isinstance(second, bool):
        return first if second else False
    if first is second or (isinstance(first, RandomMask) and first == second):
        return first
    return as_tensor(first, shape, device) & as_tensor(second, shape, device)


def active_entries(mask: Mask, shape: Sequence[int]) -> int:
    """How many of a parameter's entries the mask lets train."""
    entries = math.prod(shape)
    if isinstance(mask, bool):
        return entries if mask else 0
    drawn = as_tensor(mask, shape)
    return int(drawn.sum()) * (entries // max(drawn.numel(), 1))


def same_mask(first: Mask | None, second: Mask | None) -> bool:
    """Whether two masks are known to be equal without looking at their entries."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return first is second
    return type(first) is type(second) and first == second


def mask_to_state(mask: Mask) -> bool | Tensor | dict[str, Any]:
    """A mask as a checkpoint holds it under ``weights_only=True``: a recipe as its numbers."""
    if isinstance(mask, RandomMask):
        return mask.state()
    return whole(mask) if isinstance(mask, Tensor) else mask


def mask_from_state(state: bool | Tensor | Mapping[str, Any], device: torch.device | str = "cpu") -> Mask:
    """The mask that :func:`mask_to_state` gave."""
    if isinstance(state, Mapping):
        return recipe_from_state(state)
    return state.to(device) if isinstance(state, Tensor) else state
