"""Moves active entries by an update rule, compiled by `torch.compile` where they are many."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gradpolicy.optim import compiling
from gradpolicy.optim.ages import Ages, Slices
from gradpolicy.optim.update_rules import Group, State, UpdateRule

CHUNK = 1 << 17
"""Entries that a CPU moves at a time, where it must copy them or has no compiler."""
FEW = 0.25
"""The share of active rows up to which a CPU copies them, instead of moving all."""
JOINED, SMALL = 1 << 22, 1 << 14
"""Entries that are joined for one call: of all tensors on an accelerator, of small ones on a CPU."""
_FIRST_AGES, _MOST_TABLES = 1024, 64
_tables: WeakKeyDictionary[UpdateRule, dict[Any, tuple[Tensor, bool]]] = WeakKeyDictionary()


@dataclass(slots=True, eq=False)
class Entries:
    """The entries of a tensor on this process, which a rule moves.

    Attributes:
        parameter, gradient: Real numbers in the shape of the ages.
        state: The rule's state, in the same shape or, where ages are of stored slices, of these (1-D).
        ages: Which are active, and their ages.
        age: The age that all have by the tensor's own count; None: each has its own.
        cache: What :func:`_weights` and :func:`_mask` have made, for as long as the mask stays.
    """

    parameter: Tensor
    gradient: Tensor
    state: State
    ages: Ages
    age: int | None
    cache: dict[Any, list[Tensor]]


@dataclass(slots=True, eq=False)
class _Piece:
    """What one call moves: views of the entries, or copies that are written back.

    Attributes:
        names: Names of the state.
        tensors: Parameter, gradient, mask or None for all, the state, and for each of the constants a tensor
            of each entry's weight or None.
        constants: The number of the age of all, or what the updates since the mask was set add.
        index: Positions of the slices that move, a row each of the parameter and the gradient, and of the
            state unless `is_stored`; None: all move.
        is_stored: True if only these slices have state.
        write_back: Writes the copies back.
    """

    names: tuple[str, ...]
    tensors: list[Tensor | None]
    constants: list[float]
    index: Tensor | None = None
    is_stored: bool = False
    write_back: list[Callable[[], None]] = field(default_factory=list)

    @property
    def parameter(self) -> Tensor:
        """The parameter's entries."""
        assert self.tensors[0] is not None
        return self.tensors[0]

    def changed(self, change: Callable[[Tensor], Tensor]) -> _Piece:
        """Return the piece with other views of its tensors."""
        tensors = [None if each is None else change(each) for each in self.tensors]
        return _Piece(self.names, tensors, self.constants, self.index, self.is_stored)

    def written(self) -> list[Tensor]:
        """Return the tensors that a call writes: the parameter and the state."""
        return [self.parameter, *self.tensors[3 : 3 + len(self.names)]]  # type: ignore[list-item]


def update(rule: UpdateRule, group: Group, tensors: Sequence[Entries]) -> None:
    """Update active entries of tensors of one dtype and device.

    Args:
        rule: How one entry moves.
        group: The param group.
        tensors: The tensors.
    """
    settings, first = rule.settings(group), tensors[0].parameter
    compiles = compiling.compiles(sum(each.parameter.numel() for each in tensors))
    # Inductor decides by the first tensor that it sees whether threads share the work.
    tensors = sorted(tensors, key=lambda each: -each.parameter.numel()) if compiles else tensors
    oldest = max(each.ages.oldest if each.age is None else each.age for each in tensors)
    numbers = _Numbers(rule.bases(group), *_table(rule, group, oldest))
    pieces = (piece for each in tensors for piece in _pieces(numbers, each, compiles))
    for piece in _joined(pieces, SMALL if on_cpu(first) else JOINED):
        _call(rule, settings, piece, compiles and piece.parameter.numel() > 1)
        for write in piece.write_back:
            write()


def on_cpu(tensor: Tensor) -> bool:
    """Return True for a tensor that is moved in parts which stay in a processor's cache."""
    return tensor.device.type == "cpu"


# --- numbers that follow from ages


class _Numbers:
    """What a rule and a param group say of the ages of entries, as far as it was asked for.

    Args:
        bases: The bases of moving averages.
        table: A row of numbers (float64) for each age after an update.
        is_constant: True if all rows are the same.
    """

    def __init__(self, bases: tuple[float, ...], table: Tensor, is_constant: bool) -> None:
        self.bases, self.is_constant, self._table = bases, is_constant, table
        self._rows: dict[int, list[float]] = {}
        self._columns: dict[Any, list[Tensor]] = {}

    def of(self, age: int) -> list[float]:
        """Return the numbers after one more update of an entry of an age."""
        if age not in self._rows:
            self._rows[age] = self._table[age].tolist()
        return self._rows[age]

    def columns(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return each number for all ages, those of no update in front."""
        if (dtype, device) not in self._columns:
            table = torch.cat([torch.zeros_like(self._table[:1]), self._table])
            self._columns[dtype, device] = list(table.t().to(device, dtype).contiguous())
        return self._columns[dtype, device]


def _table(rule: UpdateRule, group: Group, oldest: int) -> tuple[Tensor, bool]:
    """Return a row of numbers (float64) for each age after an update; True if all are the same."""
    bases, settings = rule.bases(group), rule.age_settings(group)
    # The default dtype is that in which torch counts some of them.
    key, known = (bases, settings, torch.get_default_dtype()), _tables.setdefault(rule, {})
    if key not in known or len(known[key][0]) <= oldest:
        length = max(_FIRST_AGES, 1 << oldest.bit_length())
        ages = torch.arange(1, length + 1, dtype=torch.float64, device="cpu")
        columns = [*(1 - base**ages for base in bases), *rule.numbers(ages, *settings)]
        table = torch.stack(columns, 1) if columns else ages.new_zeros(length, 0)
        if len(known) >= _MOST_TABLES:
            known.clear()  # a scheduler may change the betas at every step
        known[key] = table, bool((table == table[:1]).all())
    return known[key]


def _weights(numbers: _Numbers, each: Entries) -> tuple[list[float], list[Tensor | None]]:
    """Return a constant for each of the rule's numbers, and a weight for each entry or None.

    A moving average of base b has collected the weight w = 1 - b^a in a updates; n updates later it is
    w + e (1 - w) with e = 1 - b^n. So a step needs no powers. Without weights the number is the constant.
    """
    ages, age = each.ages, each.ages.one if each.age is None else each.age
    if age is not None or numbers.is_constant:
        constants = numbers.of(age or 0)
        return constants, [None] * len(constants)
    above, bases = ages.others, numbers.bases
    assert isinstance(above, Tensor)
    dtype = torch.promote_types(each.parameter.dtype, torch.float32)
    columns = numbers.columns(dtype, above.device)
    present = [column[ages.youngest + 1 :] for column in columns]
    if ages.stored is not None:  # where memory counts
        return [0.0] * len(columns), [*_looked_up(present, above)]
    if (bases, dtype) not in each.cache:
        each.cache.clear()  # of other bases
        each.cache[bases, dtype] = _looked_up(columns[: len(bases)], above)
    others = _looked_up(present[len(bases) :], above)
    elapsed = [1 - base ** (ages.youngest + 1) for base in bases]
    return elapsed + [0.0] * len(others), [*each.cache[bases, dtype], *others]


def _mask(each: Entries, compiles: bool) -> Tensor:
    """Return the mask in the form in which it is read fastest."""
    mask = each.ages.mask
    if not compiles:
        return mask
    if not on_cpu(mask) or each.parameter.element_size() < 4:
        return mask.view(torch.uint8)
    # Inductor's loops over float32 read single bytes slowly, over bfloat16 half precision.
    if "mask" not in each.cache:
        each.cache["mask"] = [mask.half()]
    return each.cache["mask"][0]


def _looked_up(columns: list[Tensor], places: Tensor) -> list[Tensor]:
    """Return for each column its numbers at the given places."""
    if not on_cpu(places):
        flat = places.int().reshape(-1)
        return [column.index_select(0, flat).view(places.shape) for column in columns]
    # NumPy takes a quarter of the time; it converts places to 8 bytes.
    found = [torch.empty(places.shape, dtype=column.dtype, device="cpu") for column in columns]
    flat = places.reshape(-1)
    for start in range(0, flat.numel() if columns else 0, CHUNK):
        part = slice(start, start + CHUNK)
        indices = flat[part].long().numpy()
        for column, values in zip(columns, found, strict=True):
            np.take(column.numpy(), indices, out=values.view(-1)[part].numpy(), mode="clip")
    return found


# --- what a call moves


def _pieces(numbers: _Numbers, each: Entries, compiles: bool) -> Iterator[_Piece]:
    """Yield a tensor in pieces: of some slices, or of all."""
    ages, chunked = each.ages, on_cpu(each.parameter)
    constants, weights = _weights(numbers, each)
    few = chunked and ages.dims < len(ages.shape) and 0 < ages.active <= FEW * ages.entries
    if ages.stored is None and not few:
        active = _mask(each, compiles) if ages.is_partial else None
        tensors = [each.parameter, each.gradient, active, *each.state.values(), *weights]
        piece = _collapsed(_Piece(tuple(each.state), tensors, constants))
        yield from _chunks(piece) if chunked and not compiles else [piece]
        return
    slices = ages.active_slices()
    if chunked and compiles and (indexed := _indexed(each, slices, constants, weights)) is not None:
        yield indexed
        return
    count = max(CHUNK // slices.size, 1) if chunked else max(len(slices.index), 1)
    for start in range(0, len(slices.index), count):
        yield _gathered(each, slices, slice(start, start + count), constants, weights)


def _indexed(
    each: Entries, slices: Slices, constants: list[float], weights: list[Tensor | None]
) -> _Piece | None:
    """Return a piece of some slices without copies; None if they are not rows of a view, or few entries."""
    is_stored, size = each.ages.stored is not None, slices.size
    values = [each.parameter, each.gradient, *each.state.values()]
    if slices.index.numel() * size <= SMALL or not all(value.is_contiguous() for value in values):
        return None
    rows = [value.view(-1, size) for value in values]
    if not is_stored:
        coarse = (*slices.shape[: slices.dims], *(1,) * (len(slices.shape) - slices.dims))
        weights = [None if weight is None else weight.expand(coarse).reshape(-1, 1) for weight in weights]
    tensors = [*rows[:2], None, *rows[2:], *weights]
    return _Piece(tuple(each.state), tensors, constants, slices.index, is_stored)


def _gathered(
    each: Entries, slices: Slices, part: slice, constants: list[float], weights: list[Tensor | None]
) -> _Piece:
    """Return a piece of copies of some slices, and of views of state that only these have."""
    some, is_stored = replace(slices, index=slices.index[part]), each.ages.stored is not None

    def rows(value: Tensor) -> Tensor:
        return value.view(len(slices.index), -1)[part] if is_stored else some.take(value)

    state = [rows(value) for value in each.state.values()]
    if not is_stored:
        leading = each.ages.shape[: slices.dims]
        weights = [None if w is None else w.expand(*leading, *w.shape[slices.dims :]) for w in weights]
    tensors = [some.take(each.parameter), some.take(each.gradient), None, *state]
    piece = _Piece(tuple(each.state), [*tensors, *(w if w is None else rows(w) for w in weights)], constants)
    targets = [each.parameter, *(() if is_stored else each.state.values())]
    copies = [tensors[0], *(() if is_stored else state)]
    piece.write_back = [functools.partial(some.put, *pair) for pair in zip(targets, copies, strict=True)]
    return piece


def _collapsed(piece: _Piece) -> _Piece:
    """Return views with as few dimensions as all tensors allow, so that few shapes are compiled."""
    shape, tensors = piece.parameter.shape, [each for each in piece.tensors if each is not None]
    full_ones = [each for each in tensors if each.shape == shape]
    if not all(map(Tensor.is_contiguous, full_ones)):
        return piece
    if len(full_ones) == len(tensors):
        return piece if len(shape) == 1 else piece.changed(lambda each: each.view(-1))
    dims: list[tuple[int, list[bool]]] = []
    for dim, size in enumerate(shape):
        full = [each.shape[dim] == size for each in tensors]
        if size != 1 and dims and dims[-1][1] == full:
            dims[-1] = dims[-1][0] * size, full
        elif size != 1:
            dims.append((size, full))
    views = iter(
        each.reshape([size if full[place] else 1 for size, full in dims] or [1])
        for place, each in enumerate(tensors)
    )
    return piece.changed(lambda _: next(views))


def _chunks(piece: _Piece) -> Iterator[_Piece]:
    """Yield the piece in parts whose temporary values stay in a processor's cache."""
    if piece.parameter.numel() <= CHUNK:
        yield piece
        return
    rows = len(piece.parameter)
    count = max(CHUNK * rows // piece.parameter.numel(), 1)
    for start in range(0, rows, count):
        part = slice(start, start + count)
        yield piece.changed(lambda each, part=part: each[part] if len(each) == rows else each)  # type: ignore[misc]


def _joined(pieces: Iterator[_Piece], most: int) -> Iterator[_Piece]:
    """Yield pieces of at most so many entries flat and joined, so that there are few calls."""
    alike: dict[Any, list[_Piece]] = {}
    entries: dict[Any, int] = {}
    for piece in pieces:
        size = piece.parameter.numel()
        if size > most:
            yield piece
            continue
        forms = [each if each is None else each.dtype for each in piece.tensors]
        key = (*piece.constants, *piece.names, *forms)
        alike.setdefault(key, []).append(piece)
        entries[key] = entries.get(key, 0) + size
        if entries[key] >= JOINED:
            yield _join(alike.pop(key))
            del entries[key]
    yield from map(_join, alike.values())


def _join(pieces: list[_Piece]) -> _Piece:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    shapes = [each.parameter.shape for each in pieces]
    columns = zip(*(each.tensors for each in pieces), strict=True)
    tensors = [
        None
        if column[0] is None
        else torch.cat([_flat(each, shape) for each, shape in zip(column, shapes, strict=True)])
        for column in columns
    ]
    joined, sizes = replace(first, tensors=tensors), [shape.numel() for shape in shapes]

    def split() -> None:
        for values, *targets in zip(joined.written(), *(each.written() for each in pieces), strict=True):
            parts = zip(values.split(sizes), shapes, strict=True)
            views = [part if len(shape) == 1 else part.view(shape) for part, shape in parts]
            torch._foreach_copy_(targets, views)

    joined.write_back = [split, *(write for each in pieces for write in each.write_back)]
    return joined


def _flat(tensor: Tensor, shape: torch.Size) -> Tensor:
    tensor = tensor if tensor.shape == shape else tensor.expand(shape)
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


# --- the call


def _call(rule: UpdateRule, settings: tuple[float, ...], piece: _Piece, compiles: bool) -> None:
    """Move a piece, by compiled code if it is to and can be compiled."""

    def eagerly() -> None:
        numbers = [torch.tensor(each, dtype=torch.float64, device="cpu") for each in piece.constants]
        _move(rule, piece.names, piece.tensors, (*settings, *numbers), piece.index, piece.is_stored)

    if not compiles:
        eagerly()
        return
    # Numbers would be compiled in, so that a scheduler's next rate would recompile.
    dtype = torch.promote_types(piece.parameter.dtype, torch.float32)
    constants: Any = torch.tensor([*settings, *piece.constants], dtype=dtype, device="cpu")
    constants = constants if piece.parameter.is_cpu else constants.unbind()
    arguments = (rule, piece.names, piece.tensors, constants, piece.index, piece.is_stored)
    compiling.run_compiled(_move, _kind(rule, piece), arguments, eagerly)


def _kind(rule: UpdateRule, piece: _Piece) -> Any:
    """Return what decides on a graph: a rule, and the forms of tensors."""
    order = sorted(range(piece.parameter.dim()), key=piece.parameter.stride)
    forms = map(compiling.form, (*piece.tensors, piece.index, piece.is_stored))
    return rule.kind, piece.parameter.device.type, *order, *piece.names, *forms


def _move(
    rule: UpdateRule,
    names: tuple[str, ...],
    tensors: Sequence[Tensor | None],
    constants: Any,
    index: Tensor | None,
    is_stored: bool,
) -> None:
    """Move active entries in place, see :class:`_Piece`; constants of ages come after the settings."""
    parameter, gradient, active, *rest = tensors
    state, weights = rest[: len(names)], rest[len(names) :]
    constants = constants.unbind() if isinstance(constants, Tensor) else constants
    count = len(constants) - len(weights)
    assert parameter is not None
    assert gradient is not None
    dtype = torch.promote_types(parameter.dtype, torch.float32)

    def taken(values: Any, of_slices: bool = is_stored) -> Any:
        return values if index is None or of_slices else values.index_select(0, index)

    numbers = tuple(
        constant if weight is None else taken(weight) + constant * (1 - taken(weight))
        for constant, weight in zip(constants[count:], weights, strict=True)
    )
    values = {name: taken(value).to(dtype) for name, value in zip(names, state, strict=True)}
    before, gradient = taken(parameter, False).to(dtype), taken(gradient, False).to(dtype)
    new, updated = rule.update(before, gradient, values, constants[:count], numbers)
    moves = active if active is None or active.dtype == torch.bool else active.float() > 0
    for old, value in ((parameter, new), *((state[names.index(n)], v) for n, v in updated.items())):
        assert old is not None
        value = value.to(old.dtype)
        if index is not None and (old is parameter or not is_stored):
            old.index_copy_(0, index.long(), value)
        else:
            # The result for frozen entries, whose gradients are arbitrary, is discarded. Inductor is slow
            # to choose between bytes.
            kept = old if old.is_floating_point() else old.to(dtype)
            old.copy_(value if moves is None else torch.where(moves, value.to(kept.dtype), kept))
