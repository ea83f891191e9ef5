"""The signed ages of a parameter's entries, which are its mask too.

An active entry of age ``a`` is written ``a + 1``, a frozen one ``-(a + 1)``, in 16 bits if no age needs more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradpolicy.optim.kernels import select
from gradpolicy.tensors.packed_mask import pack

NARROW, WIDE = torch.int16, torch.int32
LAST_NARROW = torch.iinfo(NARROW).max - 1
"""The greatest age that 16 bits hold."""


class Ages(NamedTuple):
    """Which of a parameter's entries are active, and how many updates each has had: an immutable value.

    Attributes:
        signed: Signed ages of all blocks or, with `index`, of the active blocks only.
        block: Consecutive entries in memory that share an age.
        entries: Number of entries on this process.
        active: How many of them are active.
        oldest: No entry's age is above this.
        uncounted: Updates of active entries that are not in `signed` yet.
        index: The active blocks, as bits or positions (`packed_mask.py`); None: `signed` has all blocks.
    """

    signed: Tensor
    block: int
    entries: int
    active: int
    oldest: int
    uncounted: int = 0
    index: Tensor | None = None  # type: ignore[assignment]  # tuples have a method of this name

    @classmethod
    def all_active(cls, age: int, entries: int, device: torch.device) -> Ages:
        """Return the ages of entries that are all active and of one age."""
        signed = torch.full((1,), age + 1, dtype=_dtype_for(age), device=device)
        return cls(signed, max(entries, 1), entries, entries, age)

    @classmethod
    def of(cls, signed: Tensor, block: int, entries: int) -> Ages:
        """Return the ages from signed numbers of all blocks."""
        oldest = int(signed.long().abs().max()) - 1
        active = int((signed > 0).count_nonzero()) * block
        return cls(signed.to(_dtype_for(oldest), copy=True), block, entries, active, oldest)

    @property
    def bytes(self) -> int:
        """Memory of ages and index."""
        return self.signed.nbytes + (0 if self.index is None else self.index.nbytes)

    def to(self, device: torch.device) -> Ages:
        """Return the ages on another device."""
        index = None if self.index is None else self.index.to(device)
        return self._replace(signed=self.signed.to(device), index=index)

    def counted(self) -> Ages:
        """Return the ages after one more update of the active entries."""
        signed, block, entries, active, oldest, uncounted, index = self
        return Ages(signed, block, entries, active, oldest + 1, uncounted + 1, index)

    def restarted(self) -> Ages:
        """Return the same mask with every age 0."""
        signed = torch.where(self.signed > 0, 1, -1).to(self.signed.dtype)
        return self._replace(signed=signed, oldest=0, uncounted=0)

    def dense(self) -> Tensor:
        """Return the signed ages of all blocks, with every update counted in."""
        signed = self.of_all_blocks()
        return torch.where(signed > 0, signed + self.uncounted, signed) if self.uncounted else signed

    def of_all_blocks(self) -> Tensor:
        """Return `signed` of all blocks, in a dtype that has room for the uncounted updates."""
        return self.repacked(self._roomy(), self.index, None, self.block, 1, -1)

    def of_active_blocks(self) -> Tensor:
        """Return the signed ages of the blocks in the index, with every update counted in."""
        signed = self._roomy()
        return signed + self.uncounted if self.uncounted else signed

    def _roomy(self) -> Tensor:
        """Return `signed` in as many bits as the oldest entry needs."""
        narrow = self.signed.dtype == NARROW and self.oldest >= LAST_NARROW
        return self.signed.to(WIDE) if narrow else self.signed

    def repacked(
        self,
        values: Tensor,
        source: Tensor | None,
        target: Tensor | None,
        block: int,
        per_block: int,
        fill: float,
    ) -> Tensor:
        """Return values of the blocks of one index as values of the blocks of another.

        Args:
            values: As many a block as `per_block`.
            source: The index of `values`; None: they are of all blocks.
            target: The index of the result; None: it is of all blocks.
            block: Entries in a block of either index.
            per_block: Values in a block.
            fill: The value of blocks that `source` lacks.
        """
        if source is target is None:
            return values
        kernels = select(values.device, values.dtype)
        return kernels.repack(values, source, target, per_block, self.entries // block, fill)

    def index_by(self, block: int) -> Tensor | None:
        """Return the index with blocks of another size, which divides the size of these."""
        if self.index is None or self.block == block:
            return self.index
        flags = (self.of_all_blocks() > 0).repeat_interleave(self.block // block)
        return pack(flags)

    def turned(self, flags: Tensor, block: int, active: int, *, forget: bool, packs: bool) -> Ages:
        """Return the ages under another mask, in the smaller of both block sizes, in the same memory.

        Args:
            flags: The mask, a flag for each block.
            block: Entries in a block of the mask.
            active: Number of active entries.
            forget: True if frozen entries get age 0.
            packs: True if only active blocks keep their ages.
        """
        fine = min(block, self.block)
        kernels = select(self.signed.device, self.signed.dtype)
        if packs and self.index is not None and block == self.block:
            index = pack(flags)
            signed = self.repacked(self.of_active_blocks(), self.index, index, block, 1, 1)
            return Ages(signed, block, self.entries, active, self.oldest, 0, index)
        signed = self.of_all_blocks()
        if self.block > fine:
            signed = signed.repeat_interleave(self.block // fine)
        if block > fine:
            flags = flags.repeat_interleave(block // fine)
        kernels.turn(signed, self.uncounted, flags, forget)
        if block == self.entries and signed.numel() > 1 and bool((signed == signed[:1]).all()):
            signed, fine = signed[:1].clone(), block
        ages = Ages(signed, fine, self.entries, active, self.oldest)
        return ages.packed() if packs else ages

    def packed(self) -> Ages:
        """Return the ages with those of active blocks only, from those of all blocks."""
        index = pack(self.signed > 0)
        signed = self.repacked(self.signed, None, index, self.block, 1, 0)
        return self._replace(signed=signed, index=index)


def _dtype_for(age: int) -> torch.dtype:
    return NARROW if age < LAST_NARROW else WIDE
