"""The operations in torch: in stretches that fit a cache on a CPU, compiled by `torch.compile` elsewhere.

Inductor vectorises comparisons of floats, not of bytes: whether an entry is active is asked of its age as a
float32, which holds every 16-bit age and the sign of any other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
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
JOINED = 1 << 22
"""Entries of small tensors that are put together for one call of compiled code."""


class Reference:
    """Carries out operations in torch. See `Kernels` for what they do."""

    def update(
        self, rule: UpdateRule, settings: tuple[float, ...], numbers: Tensor, updates: Sequence[EntryUpdate]
    ) -> None:
        """See `Kernels.update`."""
        constants: tuple[Any, ...] = settings
        if compiles(numbers.device):
            # As tensors: a number would be compiled in, and a scheduler's next rate compiled anew. They stay
            # on the CPU: a copy to the device would wait for it.
            constants = torch.tensor(settings, dtype=numbers.dtype, device="cpu").unbind()
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
    function = _compiled(_update_in_place, rule, update.parameter.dtype, numbers.device)
    for part in _stretches(update.ages.numel(), numbers.device):
        # `data` is no view of another tensor: Dynamo would compile anew for every kind of view.
        parameter, gradient, ages, *values = (
            vector.view(-1)[part].data
            for vector in (update.parameter, update.gradient, update.ages, *update.state.values())
        )
        state = dict(zip(update.state, values, strict=True))
        function(rule, parameter, gradient, state, ages, settings, numbers.data)


def _update_blocks(rule: UpdateRule, settings: tuple[Any, ...], numbers: Tensor, update: EntryUpdate) -> None:
    """Active blocks are gathered, updated and put back."""
    rows, gradients, *values = (
        tensor.view(-1, update.block).data
        for tensor in (update.parameter, update.gradient, *update.state.values())
    )
    function = _compiled(_update_gathered, rule, rows.dtype, numbers.device)
    packed = update.index is not None
    for positions, place in _active_stretches(update):
        own = place if packed else slice(None)
        ages, *parts = (tensor[own].data for tensor in (update.ages, *values))
        state = dict(zip(update.state, parts, strict=True))
        function(rule, rows, gradients, state, ages, positions, packed, settings, numbers.data)


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
    """Updates the active ones of a vector of entries."""
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


def _update_gathered(
    rule: UpdateRule,
    rows: Tensor,
    gradients: Tensor,
    state: State,
    ages: Tensor,
    positions: Tensor,
    packed: bool,
    settings: tuple[Any, ...],
    numbers: Tensor,
) -> None:
    """Updates the blocks at some positions; packed: state and ages are theirs alone."""
    dtype = numbers.dtype
    own = slice(None) if packed else positions
    values = {name: value[own].to(dtype) for name, value in state.items()}
    new, updated = rule.update(
        rows[positions].to(dtype),
        gradients[positions].to(dtype),
        values,
        settings,
        _look_up(numbers, ages[own].view(-1, 1)),
    )
    rows[positions] = new.to(rows.dtype)
    for name, value in updated.items():
        state[name][own] = value.to(state[name].dtype)


def _compiled(
    function: Callable[..., None], rule: UpdateRule, dtype: torch.dtype, device: torch.device
) -> Callable[..., None]:
    """The function as it runs on a device, for parameters of a dtype."""
    return compiled_update(function, type(rule), dtype) if compiles(device) else function


@functools.lru_cache(maxsize=128)
def compiled_update(
    function: Callable[..., None], rule_class: type[UpdateRule], dtype: torch.dtype
) -> Callable[..., None]:
    """Compiled for all optimizers of a rule, vectors of every length and every age."""
    # Dynamo counts compilations by the code object and gives up at the eighth, so each has its own.
    own = FunctionType(function.__code__.replace(), globals())
    return torch.compile(own, dynamic=True, backend=BACKEND)


# --- small tensors together


def _joined(updates: Sequence[EntryUpdate]) -> Iterator[EntryUpdate]:
    """Small tensors as one, which is updated by one call and put back where it came from."""
    for batch in _batches(updates):
        if len(batch) == 1:
            yield batch[0]
        else:
            joined = _join(batch)
            yield joined
            _put_back(joined, batch)


def _batches(updates: Sequence[EntryUpdate]) -> Iterator[list[EntryUpdate]]:
    """Updates that one call can carry out, of at most `JOINED` entries unless one tensor has more."""
    batches: dict[Any, list[EntryUpdate]] = {}
    room: dict[Any, int] = {}
    for update in updates:
        parameter, ages, packed = update.parameter, update.ages, update.index is not None
        key = (parameter.dtype, ages.dtype, packed, update.block, update.uncounted, update.age, *update.state)
        size = parameter.numel()
        if key in batches and room[key] < size:
            yield batches.pop(key)
        if key not in batches:
            batches[key], room[key] = [], JOINED
        batches[key].append(update)
        room[key] -= size
    yield from batches.values()


def _join(updates: Sequence[EntryUpdate]) -> EntryUpdate:
    first = updates[0]
    indices = [each.index for each in updates if each.index is not None]
    return dataclasses.replace(
        first,
        parameter=torch.cat(_padded(updates, _vectors([each.parameter for each in updates]))),
        gradient=torch.cat(_padded(updates, _vectors([each.gradient for each in updates]))),
        state={name: torch.cat(_vectors([each.state[name] for each in updates])) for name in first.state},
        ages=torch.cat([each.ages for each in updates]),
        index=torch.cat(indices) if indices else None,
    )


def _vectors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors as vectors; most small ones are, and Python takes a microsecond for a view."""
    return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]


def _padded(updates: Sequence[EntryUpdate], tensors: list[Tensor]) -> list[Tensor]:
    """The vectors; where they have indices, each is followed by as much as its index has bits too many."""
    block = updates[0].block
    if updates[0].index is None:
        return tensors
    padding = tensors[0].new_zeros(63 * block)
    return [part for tensor in tensors for part in (tensor, padding[: -tensor.numel() % (64 * block)])]


def _put_back(joined: EntryUpdate, updates: Sequence[EntryUpdate]) -> None:
    parameters = _vectors([each.parameter for each in updates])
    pairs = [(joined.parameter, _padded(updates, parameters))]
    pairs += [
        (value, _vectors([each.state[name] for each in updates])) for name, value in joined.state.items()
    ]
    for vector, targets in pairs:
        torch._foreach_copy_(targets, vector.split([target.numel() for target in targets]))
