"""What a new mask does to ages and state: the one place where either changes but by an update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradpolicy.optim import entry_ages, restoring
from gradpolicy.optim.initial_state import entry_state, reset_state
from gradpolicy.optim.kernels import select
from gradpolicy.optim.layout import local_mask
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.without_rule import check_entries_can_freeze, warn_of_putting_back
from gradpolicy.tensors.sharding import full_tensor, is_sharded

Change = tuple[MaskedParameter, Tensor | None]
"""A parameter, and a mask that fits it; None: every entry is active."""


def set_masks(changes: Iterable[Change]) -> None:
    """Puts masks in force: ages turn, and state is emptied, packed or spread out as `frozen_state` says."""
    for masked, mask in changes:
        masked.follow()
        mask = _take_shape(masked, mask)
        if masked.layout.size:
            flags, block = masked.layout.blocks_of(mask, masked.parameter)
            set_flags(masked, flags, block)
        else:
            take_empty_mask(masked, mask)
        masked.ready_plain_step()
        masked.ready_copies()


def _take_shape(masked: MaskedParameter, mask: Tensor | None) -> Tensor:
    """Notes the shape of a mask, and of a sharded one whether it freezes every process's part."""
    masked.mask_shape = None if mask is None else tuple(mask.shape)
    parameter = masked.parameter
    if mask is None:
        mask = torch.ones((1,) * parameter.dim(), dtype=torch.bool, device=parameter.device)
    if is_sharded(parameter):
        masked.frozen_everywhere = freezes_whole_tensor(mask)
    return mask


def freezes_whole_tensor(mask: Tensor) -> bool:
    """Whether a mask leaves nothing active on any process; of a sharded mask every process must ask."""
    return not int(full_tensor(mask.int().sum() if is_sharded(mask) else mask.count_nonzero()))


def take_empty_mask(masked: MaskedParameter, mask: Tensor) -> None:
    """Takes a mask on a process that holds no entry of the parameter."""
    masked.empty_mask = local_mask(mask, masked.parameter)
    if not is_sharded(masked.parameter):
        masked.frozen_everywhere = False
    if masked.frozen_everywhere and masked.forgets:
        _empty(masked)


def set_flags(masked: MaskedParameter, flags: Tensor, block: int) -> None:
    """Turns ages and moves state so that these blocks alone are active.

    Args:
        masked: a parameter of which this process holds entries.
        flags: one for each block of entries, in memory order.
        block: entries in a block.
    """
    active = int(flags.count_nonzero())
    partly = 0 < active < flags.numel()
    if partly and masked.rule is None:
        check_entries_can_freeze(masked.optimizer, masked.group, masked.parameter)
        warn_of_putting_back(masked.optimizer, masked.group, masked.parameter, masked.forgets)
    if not partly:
        flags, block = flags[:1], masked.layout.size
    names = () if masked.rule is None else tuple(masked.entry_state())
    masked.active_entries = active * block if partly else masked.layout.size * bool(active)
    if not is_sharded(masked.parameter):
        masked.frozen_everywhere = not active
    packs = partly and masked.rule is not None and masked.frozen_state == "drop"
    if packs and masked.index is not None and block == masked.block:
        source, fine = _repack_ages(masked, flags, block)
    else:
        source, fine = _turn_ages(masked, flags, block)
        if packs:
            _pack_ages(masked, masked.ages > 0)
    if active or masked.frozen_state != "drop":
        _move_state(masked, names, source, fine)
    if not active and masked.forgets:
        _empty(masked)
    if partly and masked.forgets and masked.rule is None:
        own = entry_state(masked.state, masked.parameter)
        restoring.empty_frozen(own, masked)


def _turn_ages(masked: MaskedParameter, flags: Tensor, block: int) -> tuple[Tensor | None, int]:
    """Brings ages in line with flags, for all blocks; they become as fine as either is.

    Returns:
        The index that had state so far, and the entries in its blocks, which are as fine.
    """
    ages, fine, source = masked.uncounted_ages(), min(block, masked.block), masked.index
    kernels = select(ages.device, ages.dtype)
    if masked.block > fine:
        ages = ages.repeat_interleave(masked.block // fine)
        source = None if source is None else kernels.pack_bits(ages > 0)
    if block > fine:
        flags = flags.repeat_interleave(block // fine)
    kernels.turn(ages, masked.uncounted, flags, masked.forgets)
    masked.ages, masked.block, masked.index, masked.uncounted = ages, fine, None, 0
    if block == masked.layout.size and ages.numel() > 1 and bool((ages == ages[:1]).all()):
        masked.ages, masked.block = ages[:1].clone(), block
    return source, fine


def _pack_ages(masked: MaskedParameter, flags: Tensor) -> None:
    """Keeps the ages of active blocks alone, from those of all."""
    masked.index = select(flags.device).pack_bits(flags)
    masked.ages = _repacked(masked, masked.ages, None, masked.block, 1)


def _repack_ages(masked: MaskedParameter, flags: Tensor, block: int) -> tuple[Tensor | None, int]:
    """Keeps the ages of blocks that are active now, from those of blocks that were; others are of age 0.

    Returns:
        As `_turn_ages`.
    """
    ages, source = masked.packed_ages(), masked.index
    masked.index = select(flags.device).pack_bits(flags)
    masked.ages = _repacked(masked, ages, source, block, 1, 1.0)
    return source, block


def _move_state(masked: MaskedParameter, names: Iterable[str], source: Tensor | None, block: int) -> None:
    """Arranges state as the new index says, one tensor after the other; empties what froze and forgets.

    Args:
        masked: the parameter, with its new ages and index.
        names: of what the rule keeps, as far as it exists.
        source: the index that had state so far; None: every entry.
        block: entries in a block of either index.
    """
    if not names:
        return
    assert masked.rule is not None
    layout, starts = masked.layout, masked.rule.state(masked.group)
    repacks = source is not None or masked.index is not None
    empties = masked.forgets and masked.index is None and masked.active_entries < layout.size
    if not repacks and not empties:
        return
    masked.forget_views()
    for name in names:
        value, start = masked.state[name], starts.get(name, 0.0)
        flat = layout.flat(value) if source is None else value
        if repacks:
            flat = _repacked(masked, flat, source, block, block, start)
        if empties:
            select(flat.device, flat.dtype).fill_frozen(flat, masked.ages, None, masked.block, start)
        if not repacks:
            layout.write_back(flat, value)
        else:
            masked.state[name] = layout.shaped(flat, masked.parameter) if masked.index is None else flat


def _repacked(
    masked: MaskedParameter,
    values: Tensor,
    source: Tensor | None,
    block: int,
    per_block: int,
    fill: float = 0.0,
) -> Tensor:
    """Values that followed another index, as they follow the parameter's.

    Args:
        masked: the parameter.
        values: so many a block.
        source: the other index; None: of all blocks.
        block: entries in a block of either index.
        per_block: values of a block.
        fill: the value of blocks that the other index lacks.
    """
    kernels = select(values.device, values.dtype)
    return kernels.repack(values, source, masked.index, per_block, masked.layout.size // block, fill)


def _empty(masked: MaskedParameter) -> None:
    """Empties the state of a tensor none of whose entries is active here."""
    masked.oldest = 0
    if not masked.state:
        return
    rule, drops = masked.rule, masked.frozen_state == "drop"
    exact = rule is not None
    # Without a rule the count is the whole tensor's, on every process alike.
    restarts = masked.bias_correction == "entry" and (exact or masked.frozen_everywhere)
    gone = restarts and (drops or not exact) and masked.forget_state()
    if not gone and drops and rule is not None:
        for name in rule.names:
            masked.state.pop(name, None)
        # Of an optimizer that counts, a step is left, by which a state removed by hand is told apart.
        masked.dropped = not masked.state
    elif not gone:
        reset_state(masked.optimizer, masked.group, masked.parameter, masked.state)
    if restarts:
        masked.set_count(0)


def adopt_ages(masked: MaskedParameter, ages: Tensor, block: int) -> None:
    """Takes signed ages from elsewhere, one for each block of entries; the state is dense.

    Whether a sharded parameter is frozen on every process is known already.
    """
    active = ages > 0
    count = int(active.count_nonzero())
    sizes = ages.long().abs()
    masked.oldest = int(sizes.max()) - 1
    dtype = entry_ages.NARROW if masked.oldest < entry_ages.LAST_NARROW else entry_ages.WIDE
    masked.ages = ages.to(dtype, copy=True)
    masked.block, masked.active_entries = block, count * block
    if not is_sharded(masked.parameter):
        masked.frozen_everywhere = not count
    exact = masked.rule is not None
    if exact and masked.frozen_state == "drop" and 0 < count < active.numel():
        names = tuple(masked.entry_state())
        _pack_ages(masked, active)
        _move_state(masked, names, None, block)
    elif not count and (masked.frozen_state == "drop" or (masked.forgets and not exact)):
        _empty(masked)
    masked.ready_plain_step()
    masked.ready_copies()
