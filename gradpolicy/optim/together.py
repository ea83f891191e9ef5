"""New masks of many parameters: what those have in common is found out once, and kernels are called once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from gradpolicy.optim import moves
from gradpolicy.optim.layout import is_sharded
from gradpolicy.optim.parameter import PARTIAL
from gradpolicy.optim.tracked import Tracked

AT_ONCE = 1 << 24
"""Entries whose masks are in memory at once at most, unless a single one has more."""

Masked = tuple[Tracked, Tensor]
Flagged = tuple[Tracked, Tensor, Tensor]
"""A parameter, its new mask, and that as flags of blocks."""


def set_masks(members: Sequence[Masked]) -> None:
    """Have parameters take masks that fit, as each of them would by `Tracked.set_mask`.

    Those that were and stay partly frozen, in the same blocks, with codes of a byte and the same ages, need
    the same new codes.
    """
    alike: defaultdict[Hashable, list[Flagged]] = defaultdict(list)
    for tracked, mask in members:
        found = _flags_and_likeness(tracked, mask)
        if found is None:
            tracked.set_mask(mask)
        else:
            flags, likeness = found
            alike[likeness].append((tracked, mask, flags))
    for flagged in alike.values():
        _change(flagged)


def _flags_and_likeness(tracked: Tracked, mask: Tensor) -> tuple[Tensor, Hashable] | None:
    """A flag a block, and what parameters that change together have in common; None: it must change alone."""
    parameter, cohorts = tracked.parameter, tracked.cohorts
    settled = tracked.kind is PARTIAL and tracked.exact and tracked.held is None and tracked.is_settled
    if not settled or cohorts.codes.dtype is not torch.int8 or is_sharded(parameter) or tracked.follow():
        return None
    flags, block = tracked.layout.blocks_of(mask, parameter)
    if block != cohorts.block or flags.numel() != cohorts.codes.numel():
        return None
    ages = (cohorts.clock, tuple(cohorts.births), tuple(cohorts.paused))
    return flags, (parameter.device, tracked.forgets, ages)


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
            tracked.forget_addresses()
            tracked.cohorts.take(slots)
            changed.append((tracked, flags))
    if changed:
        moves.recode_many([(tracked.cohorts.codes, flags) for tracked, flags in changed], table)
    if first.forgets:
        _empty_frozen([tracked for tracked, _ in changed])


def _empty_frozen(members: Sequence[Tracked]) -> None:
    """Zero moments of frozen entries."""
    moments = [(tracked, moment) for tracked in members for moment in tracked.stored.moments(None).values()]
    flats = [tracked.layout.flat(moment) for tracked, moment in moments]
    vectors = zip(flats, moments, strict=True)
    moves.clear_frozen([(flat, *tracked.active_flags()) for flat, (tracked, _) in vectors])
    for flat, (tracked, moment) in zip(flats, moments, strict=True):
        tracked.layout.write_back(flat, moment)
