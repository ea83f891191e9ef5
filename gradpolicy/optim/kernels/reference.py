"""The operations in torch: in stretches that fit a cache on a CPU, compiled by `torch.compile` elsewhere.

Inductor vectorises comparisons of floats, not of bytes: whether an entry is active is asked of its age as a
float32, which holds every 16-bit age and the sign of any other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim.kernels.interface import EntryUpdate
from gradpolicy.optim.update_rules import State, UpdateRule

STRETCH = 1 << 15
"""Entries that a CPU takes at once."""
BACKEND: Any = "inductor"
SMALL = 1 << 18
"""Tensors of fewer entries are put together for one call of compiled code."""


class Reference:
    """Carries out operations in torch. See `Kernels` for what they do."""

    def update(
        self, rule: UpdateRule, settings: tuple[float, ...], numbers: Tensor, updates: Sequence[EntryUpdate]
    ) -> None:
        """See `Kernels.update`."""
        constants: tuple[Any, ...] = settings
        if compiles(numbers.device):
            # As tensors: a number would be compiled in, and a scheduler's next rate compiled anew.
            constants = torch.tensor(settings, dtype=numbers.dtype, device=numbers.device).unbind()
        # What is joined is put back when the next one is asked for.
        for each in _joined(updates) if compiles(numbers.device) else updates:
            table = numbers[each.uncounted :] if each.age is None else numbers[each.age : each.age + 1]
            dense = each.index is None and each.block == 1
            (_update_dense if dense else _update_blocks)(rule, constants, table, each)

    def turn(self, ages: Tensor, uncounted: int, flags: Tensor, forget: bool) -> None:
        """See `Kernels.turn`."""
        for part in _stretches(ages.numel(), ages.device):
            own = torch.where(ages[part] > 0, ages[part] + uncounted, -ages[part])
            ages[part] = torch.where(flags[part], own, -1 if forget else -own)

    def pack_bits(self, flags: Tensor) -> Tensor:
        """See `Kernels.pack_bits`."""
        padded = torch.nn.functional.pad(flags.view(torch.uint8), (0, -flags.numel() % 64)).view(-1, 8)
        weights = (1 << torch.arange(8, device=flags.device)).to(torch.uint8)
        parts = [(padded[part] * weights).sum(1, dtype=torch.uint8) for part in _stretches(*_size(padded))]
        return torch.cat(parts) if parts else padded.new_empty(0)

    def fill_frozen(
        self, values: Tensor, ages: Tensor | None, index: Tensor | None, block: int, fill: float | Tensor
    ) -> None:
        """See `Kernels.fill_frozen`."""
        rows = values.view(-1, block)
        other = fill.reshape(-1, block) if isinstance(fill, Tensor) else None
        for part in _stretches(rows.shape[0], values.device, block):
            active = (_bits(index, part, values.device) if ages is None else ages[part] > 0).view(-1, 1)
            if other is None:
                rows[part].masked_fill_(~active, fill)
            else:
                rows[part] = torch.where(active, rows[part], other[part])

    def repack(
        self,
        values: Tensor,
        source: Tensor | None,
        target: Tensor | None,
        block: int,
        blocks: int,
        fill: float,
    ) -> Tensor:
        """See `Kernels.repack`."""
        parts = list(_stretches(blocks, values.device, block))
        kept = sum(int(_bits(target, part, values.device).count_nonzero()) for part in parts)
        rows, repacked = values.view(-1, block), values.new_empty(kept, block)
        read = written = 0
        for part in parts:
            old, new = (_bits(index, part, values.device) for index in (source, target))
            dense = values.new_full((part.stop - part.start, block), fill)
            stop, end = read + int(old.count_nonzero()), written + int(new.count_nonzero())
            dense[old] = rows[read:stop]
            repacked[written:end] = dense[new]
            read, written = stop, end
        return repacked.view(-1)


REFERENCE = Reference()


def compiles(device: torch.device) -> bool:
    """Whether updates on a device go through `torch.compile`."""
    return device.type != "cpu"


def _size(rows: Tensor) -> tuple[int, torch.device, int]:
    return rows.shape[0], rows.device, prod(rows.shape[1:])


def _stretches(blocks: int, device: torch.device, block: int = 1) -> Iterator[slice]:
    """Blocks in stretches that fit a CPU's cache; all at once elsewhere."""
    # A multiple of 8, so that a stretch begins with a byte of an index.
    count = max(STRETCH // block // 8 * 8, 8) if device.type == "cpu" else max(blocks, 1)
    for start in range(0, blocks, count):
        yield slice(start, min(start + count, blocks))


def _bits(index: Tensor | None, part: slice, device: torch.device) -> Tensor:
    """A flag for each block of a part, which begins with a byte of the index; None: all are set."""
    if index is None:
        return torch.ones(part.stop - part.start, dtype=torch.bool, device=device)
    own = index[part.start // 8 : -(-part.stop // 8)].unsqueeze(1)
    shifts = torch.arange(8, dtype=torch.uint8, device=index.device)
    return (own >> shifts).bitwise_and_(1).view(-1)[: part.stop - part.start].bool()


def _packed_stretches(index: Tensor, blocks: int, block: int) -> Iterator[tuple[Tensor, slice]]:
    """For each stretch the blocks (int64) that are active, and where they lie in packed memory."""
    start = 0
    for part in _stretches(blocks, index.device, block):
        positions = _bits(index, part, index.device).nonzero().view(-1) + part.start
        yield positions, slice(start, start + positions.numel())
        start += positions.numel()


# --- updates


def _update_dense(rule: UpdateRule, settings: tuple[Any, ...], numbers: Tensor, update: EntryUpdate) -> None:
    """Entries that all have state, each with an age of its own."""
    function = _in_place(rule, update.parameter.dtype, numbers.device)
    for part in _stretches(update.ages.numel(), numbers.device):
        # `data` is no view of another tensor: Dynamo would compile anew for every kind of view.
        parameter, gradient, ages, *values = (
            vector.view(-1)[part].data
            for vector in (update.parameter, update.gradient, update.ages, *update.state.values())
        )
        state = dict(zip(update.state, values, strict=True))
        function(parameter, gradient, state, ages, settings, numbers.data)


def _update_blocks(rule: UpdateRule, settings: tuple[Any, ...], numbers: Tensor, update: EntryUpdate) -> None:
    """Active blocks are gathered, updated and put back."""
    block, index = update.block, update.index
    rows, gradients = update.parameter.view(-1, block), update.gradient.view(-1, block)
    state = {name: value.view(-1, block) for name, value in update.state.items()}
    ages = update.ages.view(-1, 1)
    for positions, place in _active_stretches(update):
        own: Tensor | slice = positions if index is None else place
        dtype = numbers.dtype
        looked_up = _look_up(numbers, ages[own])
        values = {name: each[own].to(dtype) for name, each in state.items()}
        new, updated = rule.update(
            rows[positions].to(dtype), gradients[positions].to(dtype), values, settings, looked_up
        )
        rows[positions] = new.to(rows.dtype)
        for name, each in updated.items():
            state[name][own] = each.to(state[name].dtype)


def _active_stretches(update: EntryUpdate) -> Iterator[tuple[Tensor, slice]]:
    """The active blocks of a tensor a stretch at a time, and where they lie in packed memory."""
    blocks = update.parameter.numel() // update.block
    if update.index is not None:
        yield from _packed_stretches(update.index, blocks, update.block)
        return
    for part in _stretches(blocks, update.ages.device, update.block):
        yield (update.ages[part] > 0).nonzero().view(-1) + part.start, part


def _look_up(numbers: Tensor, ages: Tensor) -> tuple[Tensor, ...]:
    """The numbers of each entry by its signed age before the update; one row of numbers is all entries'."""
    if numbers.shape[0] == 1:
        return numbers[0].unbind()
    rows = (ages.long() - 1).clamp(min=0)
    return tuple(column[rows] for column in numbers.unbind(1))


def _update_in_place(
    rule: UpdateRule,
    parameter: Tensor,
    gradient: Tensor,
    state: State,
    ages: Tensor,
    settings: tuple[Any, ...],
    numbers: Tensor,
) -> None:
    """Update the active ones of a vector of entries."""
    dtype = numbers.dtype
    active = ages.to(torch.float32) > 0
    values = {name: value.to(dtype) for name, value in state.items()}
    # What comes of a frozen entry's gradient, which may be anything, is thrown away.
    new, updated = rule.update(
        parameter.to(dtype), gradient.to(dtype), values, settings, _look_up(numbers, ages)
    )
    parameter.copy_(torch.where(active, new.to(parameter.dtype), parameter))
    for name, value in updated.items():
        state[name].copy_(torch.where(active, value.to(state[name].dtype), state[name]))


def _in_place(rule: UpdateRule, dtype: torch.dtype, device: torch.device) -> Callable[..., None]:
    function = compiled_update(type(rule), dtype) if compiles(device) else _update_in_place
    return functools.partial(function, rule)


@functools.lru_cache(maxsize=64)
def compiled_update(kind: type[UpdateRule], dtype: torch.dtype) -> Callable[..., None]:
    """One function for all optimizers of a kind, vectors of every length and every age."""
    # Dynamo counts compilations by the code object and gives up at the eighth, so each has its own.
    function = FunctionType(_update_in_place.__code__.replace(), globals())
    return torch.compile(function, dynamic=True, backend=BACKEND)


def _joined(updates: Sequence[EntryUpdate]) -> Iterator[EntryUpdate]:
    """Small tensors as one, which is updated by one call and put back where it came from."""
    together: dict[Any, list[EntryUpdate]] = {}
    for update in updates:
        if update.index is None and update.block == 1 and update.parameter.numel() < SMALL:
            key = (update.parameter.dtype, update.ages.dtype, update.uncounted, update.age, *update.state)
            together.setdefault(key, []).append(update)
        else:
            yield update
    for each in together.values():
        if len(each) == 1:
            yield each[0]
            continue
        joined = _join(each)
        yield joined
        _put_back(joined, each)


def _join(updates: Sequence[EntryUpdate]) -> EntryUpdate:
    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.view(-1) for tensor in tensors])

    first = updates[0]
    return dataclasses.replace(
        first,
        parameter=join([each.parameter for each in updates]),
        gradient=join([each.gradient for each in updates]),
        state={name: join([each.state[name] for each in updates]) for name in first.state},
        ages=join([each.ages for each in updates]),
    )


def _put_back(joined: EntryUpdate, updates: Sequence[EntryUpdate]) -> None:
    sizes = [each.parameter.numel() for each in updates]
    pairs = [(joined.parameter, [each.parameter for each in updates])]
    pairs += [(value, [each.state[name] for each in updates]) for name, value in joined.state.items()]
    for vector, targets in pairs:
        torch._foreach_copy_([target.view(-1) for target in targets], list(vector.split(sizes)))
