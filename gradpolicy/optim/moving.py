"""Moves active entries by an update rule, compiled by `torch.compile` where they are many."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gradpolicy.optim import compiling
from gradpolicy.optim.ages import Ages
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.shapes import local_entries
from gradpolicy.optim.update_rules import Group, UpdateRule

CHUNK = 1 << 17
"""Entries that a CPU moves at a time, where it must copy them or has no compiler."""
FEW = 0.25
"""The share of active rows up to which a CPU copies them, instead of moving all."""
JOINED, SMALL = 1 << 22, 1 << 14
"""Entries that are joined for one call: of all tensors on an accelerator, of small ones on a CPU."""
_FIRST_AGES, _MOST_TABLES = 1024, 64
_tables: WeakKeyDictionary[UpdateRule, dict[Any, _Numbers]] = WeakKeyDictionary()


@dataclass(slots=True, eq=False)
class _Piece:
    """What one call moves: views of the entries, of which an index may choose slices.

    Attributes:
        tensors: Parameter, gradient, mask or None for all, the state, and for each of the constants a tensor
            of each entry's weight or None.
        constants: The number of the age of all, or what the updates since the mask was set add.
        index: Positions of the slices that move; None: all move.
        indexed: The number of tensors, from the first on, of which the index chooses slices: the parameter,
            the gradient and, unless only these slices have state, the state.
        write_back: Writes copies back.
    """

    tensors: list[Any]
    constants: list[float]
    index: Tensor | None = None
    indexed: int = 0
    write_back: list[Callable[[], Any]] = field(default_factory=list)

    @property
    def parameter(self) -> Tensor:
        """The parameter's entries."""
        parameter: Tensor = self.tensors[0]
        return parameter

    @property
    def shape(self) -> Sequence[int]:
        """The shape of what moves."""
        shape = self.parameter.shape
        return shape if self.index is None else (len(self.index), *shape[1:])

    @property
    def size(self) -> int:
        """The number of entries that move."""
        return self.parameter.numel() if self.index is None else prod(self.shape)

    def flat(self) -> list[Tensor | None]:
        """Return what moves of each tensor as a vector."""
        flat, shape = _taken(self.tensors, self.index, self.indexed), self.shape
        for position, tensor in enumerate(flat):
            if tensor is not None:
                tensor = tensor if tensor.shape == shape else tensor.expand(shape)
                flat[position] = tensor if tensor.dim() == 1 else tensor.reshape(-1)
        return flat


def update(rule: UpdateRule, group: Group, masked: Sequence[MaskedParameter]) -> None:
    """Update active entries of parameters of one dtype and device.

    Args:
        rule: How one entry moves.
        group: The param group.
        masked: The parameters.
    """
    for each in masked:
        each.follow()
    compiles = compiling.compiles(sum(each.ages.entries for each in masked))
    # Inductor decides by the first tensor that it sees whether threads share the work.
    masked = sorted(masked, key=lambda each: -each.ages.entries) if compiles else masked
    oldest = max(each.ages.oldest if each.one_age is None else each.one_age for each in masked)
    numbers, settings, names = _numbers(rule, group, oldest), rule.settings(group), tuple(rule.state(group))
    needed = *names, *rule.tensor_state(group, 0)
    # Raises before anything moves.
    states = [(each, each.completed(group, needed)) for each in masked]
    pieces = (piece for each, state in states for piece in _pieces(numbers, each, state, compiles))
    for piece in _joined(pieces, SMALL if on_cpu(masked[0].parameter) else JOINED):
        _call(rule, names, settings, piece, compiles and piece.size > 1)
        for write in piece.write_back:
            write()


def on_cpu(tensor: Tensor) -> bool:
    """Return True for a tensor that is moved in parts which stay in a processor's cache."""
    return tensor.device.type == "cpu"


# --- numbers that follow from ages


class _Numbers:
    """What a rule says of the ages of entries: a row of numbers (float64) for each age after an update.

    Args:
        rule: The rule.
        bases: The bases of its moving averages.
        settings: What its other numbers depend on.
        length: Number of ages.

    Attributes:
        bases: As given.
        is_constant: True if all rows are the same.
    """

    def __init__(
        self, rule: UpdateRule, bases: tuple[float, ...], settings: tuple[float, ...], length: int
    ) -> None:
        ages = torch.arange(1, length + 1, dtype=torch.float64, device="cpu")
        columns = [*(1 - base**ages for base in bases), *rule.numbers(ages, *settings)]
        self.bases, self._table = bases, torch.stack(columns, 1) if columns else ages.new_zeros(length, 0)
        self.is_constant = bool((self._table == self._table[:1]).all())
        self._rows: dict[int, list[float]] = {}
        self._columns: dict[Any, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._table)

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


def _numbers(rule: UpdateRule, group: Group, oldest: int) -> _Numbers:
    """Return the numbers of a rule under a param group, for ages up to the oldest."""
    bases, settings = rule.bases(group), rule.age_settings(group)
    # The default dtype is that in which torch counts some of them.
    key, known = (bases, settings, torch.get_default_dtype()), _tables.setdefault(rule, {})
    if key not in known or len(known[key]) <= oldest:
        if len(known) >= _MOST_TABLES:
            known.clear()  # a scheduler may change the betas at every step
        known[key] = _Numbers(rule, bases, settings, max(_FIRST_AGES, 1 << oldest.bit_length()))
    return known[key]


def _weights(numbers: _Numbers, each: MaskedParameter) -> tuple[list[float], list[Tensor | None]]:
    """Return a constant for each of the rule's numbers, and a weight for each entry or None.

    A moving average of base b has collected the weight w = 1 - b^a in a updates; n updates later it is
    w + e (1 - w) with e = 1 - b^n. So a step needs no powers. Without weights the number is the constant.
    """
    ages, age = each.ages, each.one_age
    if age is not None or numbers.is_constant:
        constants = numbers.of(age or 0)
        return constants, [None] * len(constants)
    above, bases = ages.others, numbers.bases
    assert isinstance(above, Tensor)
    dtype = torch.promote_types(each.parameter.dtype.to_real(), torch.float32)
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


def _mask(each: MaskedParameter, compiles: bool) -> Tensor | None:
    """Return the mask in the form in which it is read fastest; None if all entries move."""
    if not each.ages.is_partial:
        return None
    mask = each.ages.mask
    if not compiles:
        return mask
    if not on_cpu(mask) or each.parameter.dtype.to_real().itemsize < 4:
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


def _pieces(
    numbers: _Numbers, each: MaskedParameter, state: Sequence[Tensor], compiles: bool
) -> Iterator[_Piece]:
    """Yield a parameter in pieces: of some slices, or of all."""
    ages, gradient = each.ages, each.parameter.grad
    assert gradient is not None
    constants, weights = _weights(numbers, each)
    values = [local_entries(each.parameter), local_entries(gradient), *state]
    if ages.stored is None and not _is_few(ages, values):
        tensors = [*values[:2], _mask(each, compiles), *values[2:], *weights]
        piece = _Piece(_collapsed(tensors, ages.dims), constants)
    else:
        slices, indexed = ages.active_slices(), 2
        rows = [value.contiguous().view(-1, slices.size) for value in values]
        if ages.stored is None:
            weights, indexed = [w if w is None else slices.take(w) for w in weights], 3 + len(state)
        piece = _Piece([*rows[:2], None, *rows[2:], *weights], constants, slices.index, indexed)
        if not values[0].is_contiguous():
            piece.write_back.append(partial(values[0].copy_, rows[0].view(ages.shape)))
    cuts = on_cpu(each.parameter) and not compiles and not piece.write_back
    yield from _chunks(piece) if cuts else [piece]


def _is_few(ages: Ages, values: Sequence[Tensor]) -> bool:
    """Return True if a CPU moves the active slices alone in less time than all."""
    few = ages.dims < len(ages.shape) and 0 < ages.active <= FEW * ages.entries
    return few and on_cpu(values[0]) and all(value.is_contiguous() for value in values)


def _collapsed(tensors: list[Tensor | None], dims: int) -> list[Tensor | None]:
    """Return views in which dimensions that no mask or age cuts are one, so that few shapes are compiled.

    Args:
        tensors: The tensors, of which the first has the full shape.
        dims: The number of leading dimensions that masks or ages may cut.
    """
    present = [each for each in tensors if each is not None]
    shape = present[0].shape
    full = [each for each in present if each.shape == shape]
    if len(shape) <= 1 or not all(map(Tensor.is_contiguous, full)):
        return tensors
    first = 0 if len(full) == len(present) else min(dims, len(shape) - 1)
    return [None if each is None else each.flatten(first) for each in tensors]


def _chunks(piece: _Piece) -> Iterator[_Piece]:
    """Yield the piece in parts whose temporary values stay in a processor's cache."""
    if piece.size <= CHUNK:
        yield piece
        return
    rows = piece.shape[0]
    count = max(CHUNK * rows // piece.size, 1)
    for start in range(0, rows, count):
        part, tensors = slice(start, start + count), list(piece.tensors)
        for position, tensor in enumerate(tensors):
            if tensor is not None and position >= piece.indexed and len(tensor) == rows:
                tensors[position] = tensor[part]
        yield replace(piece, tensors=tensors, index=None if piece.index is None else piece.index[part])


def _joined(pieces: Iterator[_Piece], most: int) -> Iterator[_Piece]:
    """Yield pieces of at most so many entries flat and joined, so that there are few calls."""
    alike: dict[Any, list[_Piece]] = defaultdict(list)
    entries: Counter[Any] = Counter()
    for piece in pieces:
        size = piece.size
        if size > most:
            yield piece
            continue
        key = (*piece.constants, *(each if each is None else each.dtype for each in piece.tensors))
        alike[key].append(piece)
        entries[key] += size
        if entries[key] >= JOINED:
            yield _join(alike.pop(key))
            del entries[key]
    yield from map(_join, alike.values())


def _join(pieces: list[_Piece]) -> _Piece:
    first, sizes = pieces[0], [each.size for each in pieces]
    if len(pieces) == 1:
        return first
    columns = zip(*(each.flat() for each in pieces), strict=True)
    tensors = [None if column[0] is None else torch.cat(column) for column in columns]

    def split() -> None:
        for position in (0, *range(3, len(tensors) - len(first.constants))):
            targets, views = [], []
            for piece, part in zip(pieces, tensors[position].split(sizes), strict=True):
                target = piece.tensors[position]
                if position < piece.indexed:
                    index: Any = piece.index
                    target.index_copy_(0, index.long(), part.view(piece.shape))
                else:
                    targets.append(target)
                    views.append(part if target.dim() == 1 else part.view(target.shape))
            if targets:
                torch._foreach_copy_(targets, views)

    write_back = [split, *(write for each in pieces for write in each.write_back)]
    return _Piece(tensors, first.constants, write_back=write_back)


# --- the call


def _call(
    rule: UpdateRule, names: tuple[str, ...], settings: tuple[float, ...], piece: _Piece, compiles: bool
) -> None:
    """Move a piece, by compiled code if it is to and can be compiled."""

    def eagerly() -> None:
        numbers = [torch.tensor(each, dtype=torch.float64, device="cpu") for each in piece.constants]
        _move(rule, names, piece.tensors, (*settings, *numbers), piece.index, piece.indexed)

    if not compiles:
        eagerly()
        return
    # Numbers would be compiled in, so that a scheduler's next rate would recompile.
    dtype = torch.promote_types(piece.parameter.dtype, torch.float32)
    constants: Any = torch.tensor([*settings, *piece.constants], dtype=dtype, device="cpu")
    constants = constants if piece.parameter.is_cpu else constants.unbind()
    # What decides on a graph: a rule, and the forms of tensors.
    order = sorted(range(piece.parameter.dim()), key=piece.parameter.stride)
    forms = map(compiling.form, (*piece.tensors, piece.index, piece.indexed))
    kind = rule.kind, piece.parameter.device.type, *order, *names, *forms
    arguments = (rule, names, piece.tensors, constants, piece.index, piece.indexed)
    compiling.run_compiled(_move, kind, arguments, eagerly)


def _taken(tensors: Sequence[Any], index: Tensor | None, indexed: int) -> list[Any]:
    """Return tensors, of which the first ones are the slices that an index chooses."""
    if index is None:
        return list(tensors)
    return [
        each if each is None or place >= indexed else each.index_select(0, index)
        for place, each in enumerate(tensors)
    ]


def _move(
    rule: UpdateRule,
    names: tuple[str, ...],
    tensors: Sequence[Any],
    constants: Any,
    index: Tensor | None,
    indexed: int,
) -> None:
    """Move active entries in place, see :class:`_Piece`; constants of ages come after the settings."""
    parameter, gradient, active, *rest = _taken(tensors, index, indexed)
    state, weights = rest[: len(names)], rest[len(names) :]
    constants = constants.unbind() if isinstance(constants, Tensor) else constants
    count = len(constants) - len(weights)
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    numbers = tuple(
        constant if weight is None else weight + constant * (1 - weight)
        for constant, weight in zip(constants[count:], weights, strict=True)
    )
    values = {name: value.to(dtype) for name, value in zip(names, state, strict=True)}
    new, updated = rule.update(parameter.to(dtype), gradient.to(dtype), values, constants[:count], numbers)
    moves = active if active is None or active.dtype == torch.bool else active.float() > 0
    for place, value in ((0, new), *((3 + names.index(name), value) for name, value in updated.items())):
        old = tensors[place]
        value = value.to(old.dtype)
        if index is not None and place < indexed:
            old.index_copy_(0, index.long(), value)
        else:
            # The result for frozen entries, whose gradients are arbitrary, is discarded. Inductor is slow
            # to choose between bytes.
            kept = old if old.is_floating_point() else old.to(dtype)
            old.copy_(value if moves is None else torch.where(moves, value.to(kept.dtype), kept))
