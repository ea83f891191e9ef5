"""The operations on entries in memory, and their types.

All tensors here are contiguous and lie in memory order. A *block* is so many consecutive entries that share
an age: one entry, a row, or the whole tensor. `ages` are signed, see `entry_ages`. Where only active blocks
have state, `index` has a bit for each block, set where it is active, padded with 0 to whole words of 64 bits.
State and ages are *packed* then: those of active blocks alone, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gradpolicy.optim.update_rules import State, UpdateRule


@dataclass(slots=True)
class EntryUpdate:
    """One update of the active entries of a tensor.

    Attributes:
        parameter: all entries; written to.
        gradient: all entries.
        state: what the rule keeps, of all entries or packed; written to.
        ages: of all blocks or packed.
        block: consecutive entries that share an age.
        index: which blocks are packed; None: state and ages are of all.
        uncounted: updates that active entries have had beyond what `ages` tell.
        age: the age before this update for all entries alike; None: each entry's own.
    """

    parameter: Tensor
    gradient: Tensor
    state: State
    ages: Tensor
    block: int
    index: Tensor | None
    uncounted: int
    age: int | None


class Kernels(Protocol):
    """Who carries out operations on entries in memory."""

    def update(
        self, rule: UpdateRule, settings: tuple[float, ...], numbers: Tensor, updates: Sequence[EntryUpdate]
    ) -> None:
        """Updates active entries of tensors of one dtype.

        Args:
            rule: how one entry moves.
            settings: its numbers that are the same for all entries.
            numbers: a row for each age, from 0 updates on, in the dtype to compute in.
            updates: what to do.
        """

    def turn(self, ages: Tensor, uncounted: int, flags: Tensor, forget: bool) -> None:
        """Makes the blocks active whose flag is set, the others frozen, in place.

        Args:
            ages: of all blocks.
            uncounted: updates that active blocks have had beyond what `ages` tell; they are counted in.
            flags: one a block.
            forget: whether frozen blocks are of age 0 from now on.
        """

    def pack_bits(self, flags: Tensor) -> Tensor:
        """The index of the blocks whose flag is set."""

    def fill_frozen(
        self, values: Tensor, ages: Tensor | None, index: Tensor | None, block: int, fill: float | Tensor
    ) -> None:
        """Gives frozen blocks a number, or the values that another tensor has there, in place.

        Args:
            values: all entries.
            ages: of all blocks; None: `index` tells what is active.
            index: which blocks are active, where `ages` is None.
            block: entries in a block.
            fill: the number, or the other tensor.
        """

    def repack(
        self,
        values: Tensor,
        source: Tensor | None,
        target: Tensor | None,
        block: int,
        blocks: int,
        fill: float,
    ) -> Tensor:
        """The values of the blocks of one index, as another index has them.

        Args:
            values: of the blocks in `source`, one after the other.
            source: the index that the values follow; None: they are of all blocks.
            target: the index that the result follows; None: it is of all blocks.
            block: entries in a block.
            blocks: how many blocks there are.
            fill: the number for blocks that are in `target` alone.
        """
