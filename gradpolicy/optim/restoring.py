"""What of one parameter goes into a checkpoint, and how it comes back: state, mask and ages."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim import adam
from gradpolicy.optim.beginnings import is_torchs_own, state_of_a_first_step
from gradpolicy.optim.cohorts import Cohorts, Slots, repeat
from gradpolicy.optim.layout import Layout, coarse_mask, is_sharded
from gradpolicy.optim.parameter import freezes_whole_tensor
from gradpolicy.optim.tracked import Tracked


def state_to_save(tracked: Tracked, begun: bool) -> dict[str, Any]:
    """The dense state; where updates have begun but not here, the state that an exact one begins with."""
    stored, group = tracked.stored, tracked.stored.group
    state = stored.dense(tracked.held)
    if tracked.exact and begun and not all(key in state for key in adam.moment_keys(group)):
        state = {**stored.beginning(group, set(state), tracked.updates, None), **state}
    elif begun and not state and (is_sharded(tracked.parameter) or is_torchs_own(tracked.inner)):
        # A checkpoint has one form, whatever rests, as torch's own demand; restoring empties it again.
        state = state_of_a_first_step(tracked.inner, tracked.parameter, group)
    return state


def restore(
    tracked: Tracked, mask: Tensor | None, slots: Slots, numbers: Tensor | None, updates: int
) -> None:
    """Take saved flags and ages; the optimizer's state is loaded, and dense.

    Args:
        tracked: what takes them.
        mask: the mask, one that fits; None: all active.
        slots: the ages that slots stand for.
        numbers: each entry's slot, broadcastable to the parameter; None where there is only slot 0.
        updates: the tensor's own step count.
    """
    layout = tracked.layout
    tracked.held, tracked.updates = None, updates
    tracked.forget_addresses()
    mask = tracked.take_shape(mask)
    if not layout.size:
        tracked.take_empty_part(mask)
        return
    flags, block, _ = tracked.take_flags(mask)
    if numbers is None:
        values, values_block = torch.zeros(1, dtype=torch.int8, device=flags.device), layout.size
    else:
        values, values_block = layout.blocks_of(numbers, tracked.parameter)
    fine = min(block, values_block)
    if values.numel() > 1:
        values = repeat(values, values_block // fine)
    if flags.numel() > 1:
        flags = repeat(flags, block // fine)
    codes = _codes(flags, values)
    tracked.adopt_cohorts(Cohorts.restored(codes, layout.size // codes.numel(), slots))


def restore_parts(
    tracked: Tracked, mask: Tensor, ages: Tensor, shape: tuple[int, ...] | None, updates: int
) -> None:
    """Take flags and ages of each entry, of which this process keeps its part.

    Args:
        tracked: what takes them.
        mask: bool, the parameter's shape; as sharded as the parameter, or plain.
        ages: whole numbers, the parameter's shape.
        shape: shape of the mask as it was set.
        updates: the tensor's own step count.
    """
    parameter, layout = tracked.parameter, tracked.layout
    tracked.held, tracked.updates = None, updates
    tracked.forget_addresses()
    coarse = None if shape is None else coarse_mask(mask, parameter, shape)
    if not layout.size:
        # A process without entries too has its part of the mask.
        tracked.set_mask(coarse)
        return
    tracked.mask_shape = shape
    tracked.rests = coarse is not None and freezes_whole_tensor(coarse)
    flags, _ = layout.blocks_of(mask, parameter)
    values, numbers = torch.unique(layout.blocks_of(ages, parameter)[0], return_inverse=True)
    slots = Slots(tuple(values.tolist()), tuple(values.tolist()))
    block = _coarsest(layout, [numbers, flags])
    numbers = numbers.view(-1, block)[:, 0].to(slots.dtype)
    codes = _codes(flags.view(-1, block)[:, 0], numbers)
    tracked.take_flags(mask)
    tracked.adopt_cohorts(Cohorts.restored(codes, block, slots))


def _codes(flags: Tensor, slots: Tensor) -> Tensor:
    """Flags and slots as codes, in the dtype of the slots; either may be one value for all."""
    return torch.where(flags, slots + torch.iinfo(slots.dtype).min, slots)


def _coarsest(layout: Layout, vectors: list[Tensor]) -> int:
    """The largest block of entries within which every vector has one value."""
    physical = layout.physical_shape
    for leading in range(len(physical) + 1):
        block = prod(physical[leading:])
        rows = [vector.view(-1, block) for vector in vectors]
        if all(bool((row == row[:, :1]).all()) for row in rows):
            return block
    return 1
