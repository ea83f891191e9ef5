"""Memory only for active entries: which blocks of a tensor are held, and the way there and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt

import torch
from torch import Tensor

from gradpolicy.optim import cohorts
from gradpolicy.optim.gpu import moves as gpu_moves
from gradpolicy.optim.jitted import moves as jitted
from gradpolicy.optim.native import moves as native
from gradpolicy.optim.native.moves import GRAIN, Index, Survey

Vector = tuple[Tensor, int]
"""What is held, and a number for entries that are not, 0 where these are no codes."""
SPARE = 64
"""One value in so many is held to spare at least: the next random mask has a few more entries."""
FEW = 8 * GRAIN
"""Tensors of fewer entries are moved by way of a copy."""


def _pack_bits(flags: Tensor) -> Tensor:
    """Eight flags a byte, the first in the lowest bit."""
    padded = torch.nn.functional.pad(flags.view(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    weights = (1 << torch.arange(8, device=flags.device)).to(torch.uint8)
    return (padded * weights).sum(1, dtype=torch.uint8)


def _index(flags: Tensor) -> Index:
    """All bits, and how many are set before each GRAIN and in all."""
    grains = torch.nn.functional.pad(flags, (0, -flags.numel() % GRAIN)).view(-1, GRAIN)
    parts = flags.split(cohorts.chunk(flags.device))
    bits = torch.cat([_pack_bits(part) for part in parts])
    return Index(bits, torch.nn.functional.pad(grains.sum(1).cumsum(0), (1, 0)))


def _index_of(flags: Tensor) -> Index:
    """Where flags are set, or codes below 0."""
    known = gpu_moves.index(flags) or native.index(flags) or jitted.index(flags)
    return known or _index(flags if flags.dtype is torch.bool else flags < 0)


def _unpack_bits(bits: Tensor, count: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(1) >> shifts).bitwise_and_(1).view(-1)[:count].bool()


def _spare(count: int, size: int) -> int:
    """Values to spare behind `count` of `size` entries.

    Old and new values lie at opposite ends of the memory. Most are moved without a copy if that is further
    than the values of a GRAIN, since each of these is read before it is written over; and than places in
    masks drawn at random are apart.
    """
    apart = count * GRAIN // size + 4 * isqrt(count) if size >= FEW else 0
    return count // SPARE + 2 * isqrt(count) + apart


def _in_place(packed: Tensor, count: int, spare: int) -> Tensor | None:
    """The memory of `packed` as `count` values; None where it is too little or over twice the spare.

    The values begin as far after those of `packed`, or before them, as there is room.
    """
    room = packed.untyped_storage().nbytes() // packed.element_size()
    own = packed.is_cpu and packed.is_contiguous()
    if not own or not count <= room <= count + 2 * spare:
        return None
    start = room - count if packed.storage_offset() == 0 else 0
    return packed.new_empty(0).set_(packed.untyped_storage(), start, (count,))  # type: ignore[call-overload]


class Held:
    """The blocks that have memory: a bit an entry where blocks are single entries, else a list of rows.

    Args:
        flags: one flag a block, or one code, below 0 where it is held.
        block: consecutive entries in a block.
        count: how many blocks are held, where that is known.
        index: bits and offsets, where these are known (`block` 1).

    Attributes:
        size: entries in the whole tensor.
        block: consecutive entries in a block.
        count: blocks held.
        bits: eight entries a byte (`block` 1).
        grain: entries between two offsets.
        offsets: int64, how many entries are held before each `grain` entries, and in all (`block` 1).
        rows: int64, the blocks held (`block` above 1).
    """

    def __init__(
        self,
        flags: Tensor,
        block: int,
        count: int | None = None,
        index: Index | None = None,
    ) -> None:
        self.size = flags.numel() * block
        self.block = block
        self.bits = self.offsets = self.rows = None
        if block > 1:
            self.rows = (flags if flags.dtype is torch.bool else flags < 0).nonzero().view(-1)
            self.count = self.rows.numel()
            return
        self.bits, self.offsets, self.grain = index or _index_of(flags)
        self.count = int(self.offsets[-1]) if count is None else count

    @property
    def bytes(self) -> int:
        """Memory of the index."""
        tensors = [tensor for tensor in (self.bits, self.offsets, self.rows) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def _index(self) -> Index:
        assert self.bits is not None
        assert self.offsets is not None
        return Index(self.bits, self.offsets, self.grain)

    def vector(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty vector of one value for each entry held."""
        count = self.count * self.block
        spare = _spare(count, self.size) if device.type == "cpu" else 0
        return torch.empty(count + spare, dtype=dtype, device=device)[:count]

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
        if _repack([(None, self, [(values, packed, 0)])]):
            return packed
        for positions, place in self.chunks():
            torch.index_select(values, 0, positions, out=packed[place])
        return packed

    def move(self, packed: Tensor, other: Held, newcomer: int = 0) -> Tensor:
        """What is held here as `other` holds it, with `newcomer` for those not held here.

        `packed` is given up: its memory is written over where that will do, for fresh memory is slow.
        """
        return move_many([(self, other, [(packed, newcomer)])])[0][0]

    def _room_for(self, packed: Tensor) -> Tensor:
        """A vector to fill: the memory of `packed` where that will do."""
        here = self.grain == GRAIN  # A GPU's threads know no order.
        result = _in_place(packed, self.count, _spare(self.count, self.size)) if here else None
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
        if _repack([(self, None, [(packed, values, 0)])]):
            return values
        for positions, place in self.chunks():
            values[positions] = packed[place]
        return values


def index_many(members: Sequence[tuple[Held, Tensor]]) -> list[Survey] | None:
    """What new flags of single entries tell of each tensor, with their index; None: no kernel can."""
    known = [(flags, held.bits) for held, flags in members]
    grains = {held.grain for held, _ in members}
    return native.index_many(known) if grains == {GRAIN} else gpu_moves.index_many(known)


Move = tuple[Held, Held, Sequence[Vector]]
"""What a tensor holds before, what it holds from then on, and the vectors to move."""


def move_many(members: Sequence[Move]) -> list[list[Tensor]]:
    """`Held.move` for several vectors of many tensors, which together take little longer than one.

    Returns:
        For each tensor its vectors, as it holds them from then on.
    """
    entries = all(old.rows is None and new.rows is None for old, new, _ in members)
    moves = [
        (old, new, [(packed, new._room_for(packed), newcomer) for packed, newcomer in vectors if entries])
        for old, new, vectors in members
    ]
    if entries and _repack(moves):
        return [[result for _, result, _ in own] for *_, own in moves]
    return [
        [old._move_anyhow(packed, new, newcomer) for packed, newcomer in vectors]
        for old, new, vectors in members
    ]


def _known_index(held: Held | None) -> Index | None:
    return None if held is None else held._index


def _repack(members: Sequence[tuple[Held | None, Held | None, Sequence[tuple[Tensor, Tensor, int]]]]) -> bool:
    """Move values by a kernel, see `native.repack`; False where none can do it."""
    known = [[held for held in member[:2] if held is not None] for member in members]
    grains = {held.grain for each in known for held in each}
    if len(grains) > 1:
        return False
    packings = [
        (_known_index(old), _known_index(new), moves, each[0].size)
        for (old, new, moves), each in zip(members, known, strict=True)
    ]
    if grains == {GRAIN}:
        return native.repack(packings) or jitted.repack(packings)
    return gpu_moves.repack(packings)
