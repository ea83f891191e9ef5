"""Kernels in torch: updates in stretches that fit a CPU's cache, compiled on other devices.

All tensors are contiguous and in memory order. A *block* is a number of consecutive entries that share an
age: one entry, a row, or the whole tensor. Ages are signed, see `ages.py`. If only active blocks have state,
an *index* lists them: a bit for each block or, if few are active, positions (`packed_mask.py`). State and
ages are *packed* then: those of active blocks only, one after the other.
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
from gradpolicy.tensors.packed_mask import unpack

STRETCH = 1 << 15
"""Entries that a CPU updates at a time."""
BACKEND: Any = "inductor"
JOINED = 1 << 22
"""Entries of small tensors that are joined for one call of compiled code."""


@dataclass(slots=True, eq=False)
class EntryUpdate:
    """One update of the active entries of a tensor.

    Attributes:
        parameter: All entries; written to.
        gradient: All entries, or those of active blocks where `gradient_packed`.
        state: The rule's state, of all entries or packed; written to.
        ages: Of all blocks or packed.
        block: Consecutive entries that share an age.
        index: The blocks that are packed; None: state and ages are of all.
        uncounted: Updates of active entries that are not in `ages` yet.
        age: The age of all entries before this update; None: each has its own.
        unwritten: The copies among these tensors, with the tensors to which they are written back.
        gradient_packed: True if the gradient is of active blocks only.
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
    gradient_packed: bool = False


class Kernels:
    """Operations on entries in memory, carried out by torch."""

    def update(
        self, rule: UpdateRule, settings: tuple[float, ...], numbers: Tensor, updates: Sequence[EntryUpdate]
    ) -> None:
        """Update active entries of tensors of one dtype.

        Args:
            rule: How one entry moves.
            settings: Its numbers that are the same for all entries.
            numbers: A row for each age, from 0 updates on, in the dtype to compute in.
            updates: The updates.
        """
        function, constants = _update, settings
        if compiles(numbers.device):
            # As tensors: numbers would be compiled in, so that a scheduler's next rate would recompile. They
            # stay on the CPU, since a copy to the device would synchronise with it.
            constants = torch.tensor(settings, dtype=numbers.dtype, device="cpu").unbind()  # type: ignore[assignment]
            function = compiled_update(type(rule), updates[0].parameter.dtype)
        for batch in _batches(updates, numbers.device):
            first, places = batch[0], [_active_blocks(update) for update in batch]
            columns = [_columns(*pair) for pair in zip(batch, places, strict=True)]
            joined = [torch.cat(own) for own in zip(*columns, strict=True)] if len(batch) > 1 else columns[0]
            rows = numbers[first.uncounted :] if first.age is None else numbers[first.age : first.age + 1]
            by_age = rows.data.unbind(1)
            if function is not _update:
                # Dynamo takes equal sizes, such as the number of columns and a block, for one number.
                by_age = tuple(column.clone() for column in by_age)
            for part in _stretches(len(joined[0]), numbers.device, first.block):
                parameter, gradient, ages, *values = (each.data[part] for each in joined)
                state = dict(zip(first.state, values, strict=True))
                function(rule, parameter, gradient, ages, state, constants, by_age)
            if len(batch) > 1:
                sizes = [len(own[0]) for own in columns]
                for place in (0, *range(3, len(joined))):
                    torch._foreach_copy_([own[place] for own in columns], joined[place].split(sizes))
            for update, active, own in zip(batch, places, columns, strict=True):
                if active is not None:
                    _write_back(update, active, own)

    def turn(self, ages: Tensor, uncounted: int, flags: Tensor, forget: bool) -> None:
        """Make blocks whose flag is set active and all others frozen, in place.

        Args:
            ages: Of all blocks.
            uncounted: Updates of active blocks that are not in `ages` yet; they are added.
            flags: One a block.
            forget: True if frozen blocks get age 0.
        """
        own = torch.where(ages > 0, ages + uncounted, -ages)
        ages.copy_(torch.where(flags, own, -1 if forget else -own))

    def fill_frozen(
        self, values: Tensor, ages: Tensor | None, index: Tensor | None, block: int, fill: float | Tensor
    ) -> None:
        """Fill frozen blocks with a number, or with the values of another tensor there, in place.

        Args:
            values: All entries.
            ages: Of all blocks; None: `index` lists the active ones.
            index: The active blocks, where `ages` is None.
            block: Entries in a block.
            fill: The number, or the other tensor.
        """
        rows = values.view(-1, block)
        if ages is None:
            assert index is not None
            active = unpack(index, len(rows)).view(-1, 1)
        else:
            active = (ages > 0).view(-1, 1)
        other = fill.reshape(-1, block) if isinstance(fill, Tensor) else fill
        rows.copy_(torch.where(active, rows, other))

    def repack(
        self,
        values: Tensor,
        source: Tensor | None,
        target: Tensor | None,
        block: int,
        blocks: int,
        fill: float,
    ) -> Tensor:
        """Return the values of one index's blocks, repacked for another index.

        Args:
            values: Of the blocks in `source`, one after the other.
            source: The index of the values; None: they are of all blocks.
            target: The index of the result; None: it is of all blocks.
            block: Entries in a block.
            blocks: Number of blocks.
            fill: The number for blocks that are only in `target`.
        """
        rows = values.view(-1, block)
        if source is not None:
            dense = values.new_full((blocks, block), fill)
            dense[unpack(source, blocks)] = rows
            rows = dense
        return (rows if target is None else rows[unpack(target, blocks)]).reshape(-1)


REFERENCE = Kernels()


def compiles(device: torch.device) -> bool:
    """Return True if updates on a device use `torch.compile`."""
    return device.type != "cpu"


# --- updates


def _batches(updates: Sequence[EntryUpdate], device: torch.device) -> Iterator[list[EntryUpdate]]:
    """Yield the updates of each call: single ones on a CPU, small tensors together on other devices."""
    most = JOINED if compiles(device) else 0
    alike: dict[Any, list[EntryUpdate]] = {}
    for update in updates:
        key = (update.ages.dtype, update.block, update.uncounted, update.age, *update.state)
        alike.setdefault(key, []).append(update)
    for own in alike.values():
        batch, entries = own[:1], own[0].parameter.numel()
        for update in own[1:]:
            entries += update.parameter.numel()
            if entries > most:
                yield batch
                batch, entries = [], update.parameter.numel()
            batch.append(update)
        yield batch


def _active_blocks(update: EntryUpdate) -> Tensor | None:
    """Return the positions of active rows or packed blocks; None if all entries are updated in place."""
    if update.index is not None:
        if update.index.dtype != torch.uint8:
            return update.index.long()
        return unpack(update.index, update.parameter.numel() // update.block).nonzero().view(-1)
    return (update.ages > 0).nonzero().view(-1) if update.block > 1 else None


def _columns(update: EntryUpdate, places: Tensor | None) -> list[Tensor]:
    """Return the blocks of parameter, gradient, ages and state: copies if there are positions."""
    own = None if update.index is not None else places
    return [
        _rows(update.parameter, update.block, places),
        _rows(update.gradient, update.block, None if update.gradient_packed else places),
        _rows(update.ages, 1, own),
        *[_rows(value, update.block, own) for value in update.state.values()],
    ]


def _rows(tensor: Tensor, block: int, places: Tensor | None) -> Tensor:
    rows = tensor.view(-1, block)
    return rows if places is None else rows[places]


def _write_back(update: EntryUpdate, places: Tensor, columns: list[Tensor]) -> None:
    """Write copies of updated blocks back; packed state was updated in place."""
    parameter, _, _, *state = columns
    update.parameter.view(-1, update.block)[places] = parameter
    if update.index is None:
        for value, new in zip(update.state.values(), state, strict=True):
            value.view(-1, update.block)[places] = new


def _stretches(rows: int, device: torch.device, block: int) -> Iterator[slice]:
    """Yield rows in stretches that fit a CPU's cache; on other devices all at once."""
    count = max(STRETCH // block, 1) if device.type == "cpu" else max(rows, 1)
    for start in range(0, rows, count):
        yield slice(start, start + count)


def _update(
    rule: UpdateRule,
    parameter: Tensor,
    gradient: Tensor,
    ages: Tensor,
    state: State,
    settings: tuple[Any, ...],
    numbers: tuple[Tensor, ...],
) -> None:
    """Update the active rows, in place."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    if all(len(column) == 1 for column in numbers):  # all entries share one row
        own = tuple(column[0] for column in numbers)
    else:
        rows = (ages.long() - 1).clamp(min=0)
        own = tuple(column[rows] for column in numbers)
    # Inductor vectorises comparisons of floats, but not of short integers.
    active = ages.to(torch.float32) > 0
    values = {name: value.to(dtype) for name, value in state.items()}
    # The result for frozen entries, whose gradients are arbitrary, is discarded.
    new, updated = rule.update(parameter.to(dtype), gradient.to(dtype), values, settings, own)
    parameter.copy_(torch.where(active, new.to(parameter.dtype), parameter))
    for name, value in updated.items():
        state[name].copy_(torch.where(active, value.to(state[name].dtype), state[name]))


@functools.lru_cache(maxsize=128)
def compiled_update(rule_class: type[UpdateRule], dtype: torch.dtype) -> Callable[..., None]:
    """Return `_update`, compiled for all optimizers of a rule, and tensors of any length and age."""
    # Dynamo gives up after eight compilations of a code object, so each function has its own.
    own = FunctionType(_update.__code__.replace(), globals())
    return torch.compile(own, dynamic=True, backend=BACKEND)
