"""New masks of many parameters: what those have in common is found out once, and kernels are called once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim import moves
from gradpolicy.optim.layout import is_sharded
from gradpolicy.optim.packed import Move, index_many, move_many
from gradpolicy.optim.parameter import PARTIAL
from gradpolicy.optim.tracked import Tracked

AT_ONCE = 1 << 24
"""Entries whose masks are in memory at once at most, unless a single one has more."""

Masked = tuple[Tracked, Tensor]
Flagged = tuple[Tracked, Tensor, Tensor]
"""A parameter, its new mask, and that as flags of blocks."""
Likeness = tuple[Any, ...]


def set_masks(members: Sequence[Masked]) -> None:
    """Have parameters take masks that fit, as each of them would by `Tracked.set_mask`.

    Those that were and stay partly frozen, in the same blocks, with codes of a byte and the same ages, need
    the same new codes.
    """
    alike: defaultdict[Likeness, list[Flagged]] = defaultdict(list)
    for tracked, mask in members:
        found = _flags_and_likeness(tracked, mask)
        if found is None:
            tracked.set_mask(mask)
        else:
            flags, likeness = found
            alike[likeness].append((tracked, mask, flags))
    for likeness, flagged in alike.items():
        if likeness[-1] == _HELD:
            _change_held(flagged)
        else:
            _change(flagged)


def _flags_and_likeness(tracked: Tracked, mask: Tensor) -> tuple[Tensor, Likeness] | None:
    """A flag a block, and what parameters that change together have in common; None: it must change alone."""
    parameter, cohorts = tracked.parameter, tracked.cohorts
    settled = tracked.kind is PARTIAL and tracked.exact and tracked.is_settled
    if not settled or cohorts.codes.dtype is not torch.int8 or is_sharded(parameter) or tracked.follow():
        return None
    flags, block = tracked.layout.blocks_of(mask, parameter)
    if block != cohorts.block:
        return None
    if tracked.held is not None:
        return (flags, (parameter.device, _HELD)) if tracked.moves_entries else None
    if flags.numel() != cohorts.codes.numel():
        return None
    ages = (cohorts.clock, tuple(cohorts.births), tuple(cohorts.paused))
    return flags, (parameter.device, tracked.forgets, ages)


_HELD = "held"
"""What those have in common that move entries held before to the places of those held now."""


def _change(members: list[Flagged]) -> None:
    """Change masks of parameters that are alike."""
    first = members[0][0]
    slots, table = first.cohorts.transition(first.forgets)
    seen = None
    if len(members) > 1 and slots.dtype is torch.int8:
        seen = moves.survey_many([(tracked.cohorts.codes, flags) for tracked, _, flags in members])
    if seen is None:
        for tracked, mask, _ in members:
            tracked.set_mask(mask)
        return
    changed: list[tuple[Tracked, Tensor]] = []
    for (tracked, mask, flags), (count, differs) in zip(members, seen, strict=True):
        if count in (0, flags.numel()):
            tracked.set_mask(mask)
            continue
        tracked.take_shape(mask)
        if differs:
            tracked.active_entries = count * tracked.cohorts.block
            tracked.forget_record()
            tracked.cohorts.take(slots)
            changed.append((tracked, flags))
    if changed:
        moves.recode_many([(tracked.cohorts.codes, flags) for tracked, flags in changed], table)
    if first.forgets:
        _empty_frozen([tracked for tracked, _ in changed])


def _change_held(members: list[Flagged]) -> None:
    """Change masks of parameters that hold active entries alone."""
    held = [(tracked.held, flags) for tracked, _, flags in members if tracked.held is not None]
    seen = index_many(held) if len(members) > 1 else None
    if seen is None:
        for tracked, mask, _ in members:
            tracked.set_mask(mask)
        return
    moving: list[tuple[Tracked, Tensor, Move]] = []
    for (tracked, mask, flags), found in zip(members, seen, strict=True):
        partial = found.count not in (0, flags.numel())
        move = tracked.move_to(flags, found) if partial and not found.same else None
        if move is not None:
            moving.append((tracked, mask, move))
        elif partial and found.same:
            tracked.take_shape(mask)
        else:
            tracked.set_mask(mask)
    moved = move_many([move for *_, move in moving])
    for (tracked, mask, move), vectors in zip(moving, moved, strict=True):
        tracked.take_shape(mask)
        tracked.take_moved(move, vectors)


def _empty_frozen(members: Sequence[Tracked]) -> None:
    """Zero moments of frozen entries."""
    active = [tracked.active_flags() for tracked in members]
    flats = [tracked.flat_moments() for tracked in members]
    vectors = [(flat, *own) for own, each in zip(active, flats, strict=True) for flat in each]
    moves.clear_frozen(vectors)
    for tracked in members:
        tracked.write_back()
