"""One parameter's mask and ages: which entries train, how old each is, and which of them have memory."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import moves
from gradpolicy.optim.cohorts import Cohorts, chunk, repeat
from gradpolicy.optim.layout import (
    Layout,
    as_sharded,
    has_one_value,
    is_sharded,
    local_mask,
    local_shard,
)
from gradpolicy.optim.native import moves as native
from gradpolicy.optim.packed import Held


class Kind(Enum):
    """Whether none, some or all of a tensor's entries are active; a pickle keeps which of them it is."""

    FROZEN, PARTIAL, FULL = range(3)


FROZEN, PARTIAL, FULL = Kind


class MaskedParameter:
    """A parameter, and a flag and an age for each of its entries.

    Args:
        parameter: the parameter; every entry starts active.
        age: of every entry.

    Attributes:
        parameter: the parameter.
        shape: its shape, which must not change.
        layout: the order of this process's entries in memory.
        cohorts: flags and ages, as codes; only those of active blocks while `held` is set.
        held: which blocks have memory for codes and moments; None: all of them.
        mask_shape: shape of the mask as it was set; None after a mask of None.
        empty_part: this process's part of the mask, where it holds no entry; None elsewhere.
        kind: whether none, some or all of this process's entries are active.
        rests: whether no entry of the whole tensor is active, on any process.
        active_entries: how many of this process's entries are active.
    """

    def __init__(self, parameter: Tensor, age: int) -> None:
        self.parameter = parameter
        self.shape = parameter.shape
        self.layout = Layout.of(parameter)
        self.cohorts = Cohorts(self.layout.size, age, local_shard(parameter).device)
        self.held: Held | None = None
        self.mask_shape: tuple[int, ...] | None = None
        self.empty_part: Tensor | None = None
        self.kind, self.rests = FULL, False
        self.active_entries = self.layout.size

    def follow(self) -> bool:
        """Bring flags and ages to the parameter's device, if it has moved to another one.

        Returns:
            Whether it has moved.

        Raises:
            PolicyError: its shape has changed, so that a kernel would read and write beyond the end.
        """
        if self.parameter.shape != self.shape:
            raise PolicyError(
                f"a parameter of shape {tuple(self.shape)} now has the shape {tuple(self.parameter.shape)}; "
                "its masks and ages are no longer known: make a new optimizer for the model and wrap that"
            )
        device = self.parameter.device
        if self.cohorts.codes.device == device:
            return False
        if self.held is not None:
            self.held = Held(self.held.flags().to(device), self.held.block, self.held.count)
        self.cohorts.to(device)
        return True

    # --- taking a mask

    def take_shape(self, mask: Tensor | None) -> Tensor:
        """Note the shape of a mask, and of a sharded one whether it freezes every process's part.

        Returns:
            The mask; all True for None.
        """
        self.mask_shape = None if mask is None else tuple(mask.shape)
        if mask is None:
            mask = torch.ones((1,) * self.parameter.dim(), dtype=torch.bool, device=self.parameter.device)
        if is_sharded(self.parameter):
            self.rests = freezes_whole_tensor(mask)
        return mask

    def take_flags(self, mask: Tensor) -> tuple[Tensor, int, native.Survey]:
        """Read a mask, and note how many entries it leaves active; the codes stay as they are.

        Returns:
            One flag a block, a single one where all agree; how many entries each governs; and what was seen
            when they were counted.
        """
        flags, block = self.layout.blocks_of(mask, self.parameter)
        seen = moves.survey(flags, self.cohorts.codes, self.held)
        self.active_entries = seen.count * block
        self.kind = FULL if seen.count == flags.numel() else PARTIAL if seen.count else FROZEN
        if not is_sharded(self.parameter):
            self.rests = self.kind is FROZEN
        return (flags, block, seen) if self.kind is PARTIAL else (flags[:1], self.layout.size, seen)

    def take_empty_part(self, mask: Tensor) -> None:
        """Take a mask on a process that holds no entry of the parameter."""
        self.empty_part = local_mask(mask, self.parameter)
        self.kind = FROZEN if self.rests else FULL

    def is_in_force(self, flags: Tensor, block: int, same: bool | None) -> bool:
        """Whether these flags change nothing: then no cohort is made, and a resumed run makes none either.

        Args:
            flags: some of which are set, as were some before.
            block: entries that a flag governs.
            same: the answer, where it is known already.
        """
        if same is not None:
            return same
        own = self.cohorts.block
        if block == own == 1:
            parts = self._active_parts()
            return all(torch.equal(flags[part], active) for part, active in parts)
        finest = min(block, own)
        both = [repeat(flags, block // finest), repeat(self._active(), own // finest)]
        return torch.equal(*both)

    def _active_parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Flags of single entries a stretch at a time: masks that differ mostly do so in the first one."""
        if self.held is not None:
            yield from self.held.flag_parts()
            return
        codes = self.cohorts.codes
        count = chunk(codes.device)
        for start in range(0, codes.numel(), count):
            part = slice(start, start + count)
            yield part, codes[part] < 0

    def _active(self) -> Tensor:
        """One flag a block."""
        return self.cohorts.active() if self.held is None else self.held.flags()

    # --- memory for active blocks alone

    def hold_active(self) -> Held:
        """Keep codes of active blocks alone from now on."""
        block = self.cohorts.block
        self.held = Held(self.cohorts.codes, block, self.active_entries // block)
        self.cohorts.codes = self.held.pack(self.cohorts.codes, 1)
        return self.held

    def hold_all(self) -> Held | None:
        """Keep codes of all blocks from now on; gives back which blocks had them so far."""
        held, self.held = self.held, None
        if held is not None:
            self.cohorts.codes = held.unpack(self.cohorts.codes, 1)
        return held

    # --- what the mask and the ages are

    def mask(self) -> Tensor:
        """The mask as it was set."""
        self.follow()
        if self.mask_shape is None:
            return torch.ones((), dtype=torch.bool, device=self.parameter.device).expand(self.parameter.shape)
        if self.empty_part is not None:
            return as_sharded(self.empty_part, self.parameter, self.mask_shape)
        flags = self._of_all_blocks(self.cohorts.active())
        return self.layout.logical(flags, self.cohorts.block, self.parameter, self.mask_shape)

    def ages(self) -> Tensor:
        """Each entry's age (int64), as coarse as the masks were."""
        self.follow()
        ages = self._of_all_blocks(self.cohorts.ages())
        return self.layout.logical(ages, self.cohorts.block, self.parameter)

    def slot_numbers(self) -> Tensor:
        """Each entry's slot, as coarse as the masks were."""
        codes = self._of_all_blocks(self.cohorts.codes)
        slots = codes & torch.iinfo(codes.dtype).max
        return self.layout.logical(slots, self.cohorts.block, self.parameter).clone()

    def entrywise(self) -> tuple[Tensor, Tensor]:
        """A flag and an age (int32) for each entry, in the parameter's shape and sharded as it is."""
        shape, block = self.parameter.shape, self.cohorts.block
        active, ages = self._of_all_blocks(self.cohorts.active()), self._of_all_blocks(self.cohorts.ages())
        mask = self.layout.logical(active, block, self.parameter, shape)
        return mask, self.layout.logical(ages.int(), block, self.parameter, shape)

    def _of_all_blocks(self, values: Tensor) -> Tensor:
        """One value a block, 0 for blocks without memory."""
        return values if self.held is None else self.held.unpack(values, 1)

    def active_flags(self) -> tuple[Tensor | Held, int]:
        """Codes, or the index of active blocks, and how many entries a block has."""
        return self.cohorts.codes if self.held is None else self.held, self.cohorts.block

    def active_blocks(self) -> Tensor | None:
        """The places (int64) of active blocks of several entries; None where a block is one entry."""
        if self.cohorts.block == 1:
            return None
        return self.cohorts.active_blocks() if self.held is None else self.held.rows

    @property
    def drops_gradient(self) -> bool:
        """Whether the whole gradient goes; of a sharded parameter on every process alike."""
        if not is_sharded(self.parameter):
            return self.kind is FROZEN
        one_flag = self.mask_shape is not None and has_one_value(self.mask_shape, self.parameter)
        if self.empty_part is not None:
            return one_flag and not bool(self.empty_part)
        return one_flag and self.kind is FROZEN


def freezes_whole_tensor(mask: Tensor) -> bool:
    """Whether a mask leaves nothing active on any process; of a sharded mask every process must ask."""
    if is_sharded(mask):
        sharded: Any = mask.int().sum()
        return not int(sharded.full_tensor())
    return native.count(mask.reshape(-1)) == 0
