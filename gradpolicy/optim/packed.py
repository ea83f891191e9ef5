"""Memory only for active entries: which blocks of a tensor are held, and the way there and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradpolicy.optim import cohorts
from gradpolicy.optim.gpu import moves as gpu_moves
from gradpolicy.optim.jitted import moves as jitted
from gradpolicy.optim.native import moves as native
from gradpolicy.optim.native.moves import GRAIN

SPARE = 64
"""One value in so many is held to spare: the next random mask of the same density has a few more entries."""
SHIFT = 2 * GRAIN
"""Values between the two places where packed memory may begin; random masks move entries half as far."""


def _pack_bits(flags: Tensor) -> Tensor:
    """Eight flags a byte, the first in the lowest bit."""
    padded = torch.nn.functional.pad(flags.view(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    weights = (1 << torch.arange(8, device=flags.device)).to(torch.uint8)
    return (padded * weights).sum(1, dtype=torch.uint8)


def _bits(flags: Tensor) -> tuple[Tensor, Tensor]:
    """All bits, and how many are set in each GRAIN."""
    grains = torch.nn.functional.pad(flags, (0, -flags.numel() % GRAIN)).view(-1, GRAIN)
    parts = flags.split(cohorts.chunk(flags.device))
    return torch.cat([_pack_bits(part) for part in parts]), grains.sum(1)


def _unpack_bits(bits: Tensor, count: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(1) >> shifts).bitwise_and_(1).view(-1)[:count].bool()


def _with_spare(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty vector, with some memory behind it on a CPU."""
    spare = count // SPARE if device.type == "cpu" else 0
    return torch.empty(count + spare, dtype=dtype, device=device)[:count]


def _in_place(packed: Tensor, count: int) -> Tensor | None:
    """The memory of `packed` as `count` values; None where it is too little or over twice the spare.

    The values begin somewhat after those of `packed`, or before them, where there is room for that: most can
    then be moved without a copy, since their places are read before they are written over.
    """
    room = packed.untyped_storage().nbytes() // packed.element_size()
    own = packed.is_cpu and packed.is_contiguous()
    if not own or not count <= room <= count + 2 * count // SPARE:
        return None
    start = SHIFT if packed.storage_offset() == 0 and count + SHIFT <= room else 0
    return packed.new_empty(0).set_(packed.untyped_storage(), start, (count,))  # type: ignore[call-overload]


class Held:
    """The blocks that have memory: a bit an entry where blocks are single entries, else a list of rows.

    Args:
        flags: one flag a block, or one code, below 0 where it is held.
        block: consecutive entries in a block.
        count: how many blocks are held, where that is known.
        index: the flags as bits and how many are set in each GRAIN, where that is known (`block` 1).

    Attributes:
        size: entries in the whole tensor.
        block: consecutive entries in a block.
        count: blocks held.
        bits: eight entries a byte (`block` 1).
        grain: entries between two offsets.
        offsets: int64, how many entries are held before each `grain` entries (`block` 1).
        rows: int64, the blocks held (`block` above 1).
    """

    def __init__(
        self,
        flags: Tensor,
        block: int,
        count: int | None = None,
        index: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.size = flags.numel() * block
        self.block = block
        self.bits = self.offsets = self.rows = None
        if block > 1:
            self.rows = (flags if flags.dtype is torch.bool else flags < 0).nonzero().view(-1)
            self.count = self.rows.numel()
            return
        found = gpu_moves.bits(flags) if index is None else None
        self.grain = gpu_moves.tile() if found else GRAIN
        found = index or found or native.bits(flags) or jitted.bits(flags)
        self.bits, counts = found or _bits(flags if flags.dtype is torch.bool else flags < 0)
        counts = counts.cumsum(0)
        self.count = int(counts[-1]) if count is None else count
        self.offsets = torch.nn.functional.pad(counts, (1, 0))

    @property
    def bytes(self) -> int:
        """Memory of the index."""
        tensors = [tensor for tensor in (self.bits, self.offsets, self.rows) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def _index(self) -> tuple[Tensor, Tensor]:
        assert self.bits is not None
        assert self.offsets is not None
        return self.bits, self.offsets

    def vector(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty vector of one value for each entry held."""
        return _with_spare(self.count * self.block, dtype, device)

    def flags(self) -> Tensor:
        """One flag a block."""
        if self.rows is not None:
            flags = torch.zeros(self.size // self.block, dtype=torch.bool, device=self.rows.device)
            flags[self.rows] = True
            return flags
        assert self.bits is not None
        return self.unpack(torch.ones(self.count, dtype=torch.uint8, device=self.bits.device)).bool()

    def chunks(self) -> Iterator[tuple[Tensor, slice]]:
        """For each stretch of entries: the positions of those held, and their place in packed memory."""
        start = 0
        for part, flags in self.flag_parts():
            positions = flags.nonzero().view(-1).add_(part.start)
            yield positions, slice(start, start + positions.numel())
            start += positions.numel()

    def flag_parts(self) -> Iterator[tuple[slice, Tensor]]:
        """One flag an entry, a stretch of entries at a time (`block` 1)."""
        assert self.bits is not None
        most = cohorts.chunk(self.bits.device)
        for first in range(0, self.size, most):
            count = min(most, self.size - first)
            yield (
                slice(first, first + count),
                _unpack_bits(self.bits[first // 8 : (first + count + 7) // 8], count),
            )

    def pack(self, values: Tensor, block: int | None = None) -> Tensor:
        """The held part of `values`, which has `block` (by default this index's) entries a block."""
        block = self.block if block is None else block
        if self.rows is not None:
            return values.view(-1, block).index_select(0, self.rows).view(-1)
        packed = self.vector(values.dtype, values.device)
        if _repack(None, self, [(values, packed, 0)]):
            return packed
        for positions, place in self.chunks():
            torch.index_select(values, 0, positions, out=packed[place])
        return packed

    def move(self, packed: Tensor, other: Held, newcomer: int = 0) -> Tensor:
        """What is held here as `other` holds it, with `newcomer` for those not held here.

        `packed` is given up: its memory is written over where that will do, for fresh memory is slow.
        """
        return self.move_together([(packed, newcomer)], other)[0]

    def move_together(self, vectors: Sequence[tuple[Tensor, int]], other: Held) -> list[Tensor]:
        """`move` for several vectors and their newcomers, which together take little longer than one."""
        entries = self.rows is None and other.rows is None
        moves = [(packed, other._room_for(packed), newcomer) for packed, newcomer in vectors if entries]
        if moves and _repack(self, other, moves):
            return [result for _, result, _ in moves]
        if len(vectors) > 1:
            return [self.move(packed, other, newcomer) for packed, newcomer in vectors]
        return [self._move_anyhow(packed, other, newcomer) for packed, newcomer in vectors]

    def _room_for(self, packed: Tensor) -> Tensor:
        """A vector to fill: the memory of `packed` where that will do."""
        result = _in_place(packed, self.count)
        return self.vector(packed.dtype, packed.device) if result is None else result

    def _move_anyhow(self, packed: Tensor, other: Held, newcomer: int) -> Tensor:
        moved = other.pack(self.unpack(packed))
        return (
            moved if not newcomer else moved.masked_fill_(other.pack(self.flags()).logical_not_(), newcomer)
        )

    def unpack(self, packed: Tensor, block: int | None = None) -> Tensor:
        """The whole tensor again, 0 where nothing is held."""
        block = self.block if block is None else block
        values = torch.zeros(self.size // self.block * block, dtype=packed.dtype, device=packed.device)
        if self.rows is not None:
            values.view(-1, block).index_copy_(0, self.rows, packed.view(-1, block))
            return values
        if _repack(self, None, [(packed, values, 0)]):
            return values
        for positions, place in self.chunks():
            values[positions] = packed[place]
        return values


def _repack(old: Held | None, new: Held | None, moves: Sequence[tuple[Tensor, Tensor, int]]) -> bool:
    """Move values by a kernel, see `native.repack`; False where none can do it."""
    known = [held for held in (old, new) if held is not None]
    grains = {held.grain for held in known}
    before, after = (None if held is None else held._index for held in (old, new))
    size = known[0].size
    if grains == {GRAIN}:
        return native.repack(before, after, moves, size) or jitted.repack(before, after, moves, size)
    if len(grains) > 1:
        return False
    return all(gpu_moves.repack(before, after, values, result, size, new) for values, result, new in moves)
