"""Kernels in torch: in stretches that fit the cache of a CPU, compiled on other devices.

All tensors are contiguous and lie in memory order. A *block* is so many consecutive entries that share an
age: one entry, a row, or the whole tensor. Ages are signed, see `ages.py`. Where only active blocks have
state, an *index* has a bit for each block, set where it is active, padded with 0 to whole words of 64 bits.
State and ages are *packed* then: those of active blocks alone, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim.update_rules import State, UpdateRule

STRETCH = 1 << 15
"""Entries that a CPU takes at once."""
BACKEND: Any = "inductor"
JOINED = 1 << 22
"""Entries of small tensors that are joined for one call of compiled code."""


@dataclass(slots=True, eq=False)
class EntryUpdate:
    """One update of the active entries of a tensor.

    Attributes:
        parameter: All entries; written to.
        gradient: All entries.
        state: What the rule keeps, of all entries or packed; written to.
        ages: Of all blocks or packed.
        block: Consecutive entries that share an age.
        index: The blocks that are packed; None: state and ages are of all.
        uncounted: Updates of active entries that are not in `ages` yet.
        age: The age before this update for all entries alike; None: each entry's own.
        unwritten: Those of the above that are copies, with the tensors that they are written back to.
    """

    parameter: Tensor
    gradient: Tensor
    state: State
    ages: Tensor
    block: int
    index: Tensor | None
    uncounted: int
    age: int | None
    unwritten: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Kernels:
    """Operations on entries in memory, carried out by torch."""

    def update(
        self, rule: UpdateRule, settings: tuple[float, ...], numbers: Tensor, updates: Sequence[EntryUpdate]
    ) -> None:
        """Updates active entries of tensors of one dtype.

        Args:
            rule: How one entry moves.
            settings: Its numbers that are the same for all entries.
            numbers: A row for each age, from 0 updates on, in the dtype to compute in.
            updates: The updates.
        """
        function, constants = _update, settings
        if compiles(numbers.device):
            # As tensors: a number would be compiled in, and a scheduler's next rate compiled anew. They stay
            # on the CPU: a copy to the device would wait for it.
            constants = torch.tensor(settings, dtype=numbers.dtype, device="cpu").unbind()  # type: ignore[assignment]
            function = compiled_update(type(rule), updates[0].parameter.dtype)
        for batch in _batches(updates, numbers.device):
            first, columns = batch[0].update, [piece.tensors() for piece in batch]
            joined = [torch.cat(own) for own in zip(*columns, strict=True)] if len(batch) > 1 else columns[0]
            parameter, gradient, ages, *values = (each.data for each in joined)
            state = dict(zip(first.state, values, strict=True))
            rows = numbers[first.uncounted :] if first.age is None else numbers[first.age : first.age + 1]
            function(rule, parameter, gradient, ages, state, constants, rows.data)
            if len(batch) > 1:
                sizes = [len(own[0]) for own in columns]
                for place in (0, *range(3, len(joined))):
                    torch._foreach_copy_([own[place] for own in columns], joined[place].split(sizes))
            for piece, own in zip(batch, columns, strict=True):
                piece.put(own)

    def turn(self, ages: Tensor, uncounted: int, flags: Tensor, forget: bool) -> None:
        """Makes the blocks active whose flag is set, the others frozen, in place.

        Args:
            ages: Of all blocks.
            uncounted: Updates of active blocks that are not in `ages` yet; they are counted in.
            flags: One a block.
            forget: True if frozen blocks are of age 0 from now on.
        """
        for part in _stretches(ages.numel(), ages.device):
            own = torch.where(ages[part] > 0, ages[part] + uncounted, -ages[part])
            ages[part] = torch.where(flags[part], own, -1 if forget else -own)

    def pack_bits(self, flags: Tensor) -> Tensor:
        """Return the index of the blocks whose flag is set."""
        padded = torch.nn.functional.pad(flags.view(torch.uint8), (0, -flags.numel() % 64)).view(-1, 8)
        weights = (1 << torch.arange(8, device=flags.device)).to(torch.uint8)
        parts = [
            (padded[part] * weights).sum(1, dtype=torch.uint8)
            for part in _stretches(len(padded), flags.device)
        ]
        return torch.cat(parts) if parts else padded.new_empty(0)

    def fill_frozen(
        self, values: Tensor, ages: Tensor | None, index: Tensor | None, block: int, fill: float | Tensor
    ) -> None:
        """Gives frozen blocks a number, or the values that another tensor has there, in place.

        Args:
            values: All entries.
            ages: Of all blocks; None: `index` says which are active.
            index: The active blocks, where `ages` is None.
            block: Entries in a block.
            fill: The number, or the other tensor.
        """
        rows = values.view(-1, block)
        for part in _stretches(len(rows), values.device, block):
            active = (_bits(index, part, values.device) if ages is None else ages[part] > 0).view(-1, 1)
            other = fill.reshape(-1, block)[part] if isinstance(fill, Tensor) else fill
            rows[part] = torch.where(active, rows[part], other)

    def repack(
        self,
        values: Tensor,
        source: Tensor | None,
        target: Tensor | None,
        block: int,
        blocks: int,
        fill: float,
    ) -> Tensor:
        """Return the values of the blocks of one index, as another index has them.

        Args:
            values: Of the blocks in `source`, one after the other.
            source: The index that the values follow; None: they are of all blocks.
            target: The index that the result follows; None: it is of all blocks.
            block: Entries in a block.
            blocks: Number of blocks.
            fill: The number for blocks that are in `target` alone.
        """
        whole = slice(0, blocks)
        rows = values.view(-1, block)
        if source is not None:
            dense = values.new_full((blocks, block), fill)
            dense[_bits(source, whole, values.device)] = rows
            rows = dense
        return (rows if target is None else rows[_bits(target, whole, values.device)]).reshape(-1)


REFERENCE = Kernels()


def compiles(device: torch.device) -> bool:
    """Return True if updates on a device go through `torch.compile`."""
    return device.type != "cpu"


def _stretches(blocks: int, device: torch.device, block: int = 1) -> Iterator[slice]:
    """Yield blocks in stretches that fit a CPU's cache; on other devices all at once."""
    # A multiple of 8, so that a stretch begins with a byte of an index.
    count = max(STRETCH // block // 8 * 8, 8) if device.type == "cpu" else max(blocks, 1)
    for start in range(0, blocks, count):
        yield slice(start, min(start + count, blocks))


def _bits(index: Tensor | None, part: slice, device: torch.device) -> Tensor:
    """Return a flag for each block of a part, which begins with a byte of the index; None: all are set."""
    if index is None:
        return torch.ones(part.stop - part.start, dtype=torch.bool, device=device)
    own = index[part.start // 8 : -(-part.stop // 8)].unsqueeze(1)
    shifts = torch.arange(8, dtype=torch.uint8, device=index.device)
    return (own >> shifts).bitwise_and_(1).view(-1)[: part.stop - part.start].bool()


# --- updates


Places = slice | Tensor | None
"""Blocks of a tensor; None: all of them."""


@dataclass(slots=True)
class _Piece:
    """Some blocks of one update.

    Attributes:
        update: The update.
        blocks: Their places among all blocks.
        own: Their places among the blocks that have state and ages.
    """

    update: EntryUpdate
    blocks: Places
    own: Places

    def tensors(self) -> list[Tensor]:
        """Return the rows of parameter, gradient, ages and state: copies where the places are a tensor."""
        each, block = self.update, self.update.block
        return [
            _rows(each.parameter, block, self.blocks),
            _rows(each.gradient, block, self.blocks),
            _rows(each.ages, 1, self.own),
            *[_rows(value, block, self.own) for value in each.state.values()],
        ]

    def put(self, tensors: list[Tensor]) -> None:
        """Writes rows of parameter and state back where they are copies."""
        parameter, _, _, *state = tensors
        if isinstance(self.blocks, Tensor):
            self.update.parameter.view(-1, self.update.block)[self.blocks] = parameter
        if isinstance(self.own, Tensor):
            for value, new in zip(self.update.state.values(), state, strict=True):
                value.view(-1, self.update.block)[self.own] = new


def _rows(tensor: Tensor, block: int, places: Places) -> Tensor:
    rows = tensor.view(-1, block)
    return rows if places is None else rows[places]


def _pieces(update: EntryUpdate, device: torch.device) -> Iterator[_Piece]:
    """Yield an update a stretch at a time; of rows and packed state the active blocks alone."""
    done, count = 0, update.parameter.numel() // update.block
    for part in _stretches(count, device, update.block):
        if update.index is not None:
            blocks = _bits(update.index, part, device).nonzero().view(-1) + part.start
            yield _Piece(update, blocks, slice(done, done + len(blocks)))
            done += len(blocks)
        elif update.block > 1:
            blocks = (update.ages[part] > 0).nonzero().view(-1) + part.start
            yield _Piece(update, blocks, blocks)
        else:
            own = part if part.stop - part.start < count else None
            yield _Piece(update, own, own)


def _batches(updates: Sequence[EntryUpdate], device: torch.device) -> Iterator[list[_Piece]]:
    """Yield pieces that one call can update: on a CPU each alone, on other devices small tensors together."""
    batches: dict[Any, list[_Piece]] = {}
    room: dict[Any, int] = {}
    for update in updates:
        key = (update.ages.dtype, update.block, update.uncounted, update.age, *update.state)
        size = update.parameter.numel() if compiles(device) else JOINED
        for piece in _pieces(update, device):
            if key in batches and room[key] < size:
                yield batches.pop(key)
            if key not in batches:
                batches[key], room[key] = [], JOINED
            batches[key].append(piece)
            room[key] -= size
    yield from batches.values()


def _update(
    rule: UpdateRule,
    parameter: Tensor,
    gradient: Tensor,
    ages: Tensor,
    state: State,
    settings: tuple[Any, ...],
    numbers: Tensor,
) -> None:
    """Updates the active rows, in place."""
    dtype = numbers.dtype
    if numbers.shape[0] == 1:  # one row of numbers is all entries'
        own = numbers[0].unbind()
    else:
        rows = (ages.long() - 1).clamp(min=0)
        own = tuple(column[rows] for column in numbers.unbind(1))
    # Inductor vectorises comparisons of floats, not of short integers.
    active = ages.to(torch.float32) > 0
    values = {name: value.to(dtype) for name, value in state.items()}
    # What comes of a frozen entry's gradient, which may be anything, is thrown away.
    new, updated = rule.update(parameter.to(dtype), gradient.to(dtype), values, settings, own)
    parameter.copy_(torch.where(active, new.to(parameter.dtype), parameter))
    for name, value in updated.items():
        state[name].copy_(torch.where(active, value.to(state[name].dtype), state[name]))


@functools.lru_cache(maxsize=128)
def compiled_update(rule_class: type[UpdateRule], dtype: torch.dtype) -> Callable[..., None]:
    """Return `_update`, compiled for all optimizers of a rule, tensors of every length and every age."""
    # Dynamo counts compilations by the code object and gives up at the eighth, so each has its own.
    own = FunctionType(_update.__code__.replace(), globals())
    return torch.compile(own, dynamic=True, backend=BACKEND)
