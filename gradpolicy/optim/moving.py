"""Moves active entries by an update rule, compiled by `torch.compile` where they are many."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradpolicy.errors import warn_user
from gradpolicy.optim.ages import Ages
from gradpolicy.optim.update_rules import Group, State, UpdateRule

COMPILE_FROM = 1 << 20
"""Entries of all tensors of a call from which a compiler is worth its time."""
CHUNK = 1 << 17
"""Entries that a CPU moves at a time, where it must copy them or has no compiler."""
FEW = 0.25
"""The share of active rows up to which a CPU copies them, instead of moving all."""
JOINED, SMALL = 1 << 22, 1 << 14
"""Entries that are joined for one call: of all tensors on an accelerator, of small ones on a CPU."""
BACKEND: Any = "inductor"
_FIRST_AGES, _MOST_TABLES = 1024, 64
_log = logging.getLogger(__name__)
_said: set[str] = set()
_known: set[Any] = set()
"""The kinds of calls that have been compiled."""
_tables: WeakKeyDictionary[UpdateRule, dict[Any, tuple[Tensor, bool]]] = WeakKeyDictionary()


@dataclass(slots=True, eq=False)
class Entries:
    """The entries of a tensor on this process, which a rule moves.

    Attributes:
        parameter, gradient: Real numbers in the shape of the ages.
        state: The rule's state, in the same shape or, with an index in the ages, of active slices (1-D).
        ages: Which are active, and their ages.
        age: The age that all have by the tensor's own count; None: each has its own.
        weights: A cache for :func:`_weights` as long as the mask stays.
    """

    parameter: Tensor
    gradient: Tensor
    state: State
    ages: Ages
    age: int | None
    weights: dict[Any, list[Tensor]]


@dataclass(slots=True, eq=False)
class _Piece:
    """What one call moves: views of the entries, or copies that are written back.

    Attributes:
        parameter, gradient, state: As of Entries.
        active: Which move; None: all.
        constants: The number of the age of all, or what the updates since the mask was set add.
        weights: For each of these a tensor of each entry's weight; None: there is one age.
        write_back: Writes the copies back.
    """

    parameter: Tensor
    gradient: Tensor
    state: State
    active: Tensor | None
    constants: list[float]
    weights: list[Tensor | None]
    write_back: list[Callable[[], None]] = field(default_factory=list)

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors."""
        return [self.parameter, self.gradient, self.active, *self.state.values(), *self.weights]


def update(rule: UpdateRule, group: Group, scale: float, tensors: Sequence[Entries]) -> None:
    """Update active entries of tensors of one dtype and device.

    Args:
        rule: How one entry moves.
        group: The param group.
        scale: The factor that gradients are multiplied by.
        tensors: The tensors.
    """
    sign, *rest = rule.settings(group)
    settings, first = (sign / scale, *rest), tensors[0].parameter
    compiles = sum(each.parameter.numel() for each in tensors) >= COMPILE_FROM
    # Inductor decides by the first tensor that it sees whether threads share the work.
    tensors = sorted(tensors, key=lambda each: -each.parameter.numel()) if compiles else tensors
    pieces = (piece for each in tensors for piece in _pieces(rule, group, each, compiles))
    for piece in _joined(pieces, SMALL if on_cpu(first) else JOINED):
        _call(rule, settings, piece, compiles and piece.parameter.numel() > 1)
        for write in piece.write_back:
            write()


def on_cpu(tensor: Tensor) -> bool:
    """Return True for a tensor that is moved in parts which stay in a processor's cache."""
    return tensor.device.type == "cpu"


# --- numbers that follow from ages


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


def _weights(rule: UpdateRule, group: Group, each: Entries) -> tuple[list[float], list[Tensor | None]]:
    """Return a constant for each of the rule's numbers, and a weight for each entry or None.

    A moving average of base b has collected the weight w = 1 - b^a in a updates; n updates later it is
    w + e (1 - w) with e = 1 - b^n. So a step needs no powers. Without weights the number is the constant.
    """
    ages, bases = each.ages, rule.bases(group)
    age = ages.one if each.age is None else each.age
    table, is_constant = _table(rule, group, ages.oldest if age is None else age)
    if age is not None or is_constant:
        constants = table[age or 0].tolist()
        return constants, [None] * len(constants)
    before = ages.before
    assert isinstance(before, Tensor)
    dtype = torch.promote_types(each.parameter.dtype, torch.float32)

    def gathered(columns: Tensor, shift: int) -> list[Tensor]:
        places = before.int().reshape(-1) + shift
        found = columns.t().to(before.device, dtype).contiguous()
        return [column.index_select(0, places).view(before.shape) for column in found]

    if ages.index is not None:  # where memory counts
        return [0.0] * table.shape[1], [*gathered(table, ages.since)]
    if (bases, dtype) not in each.weights:
        before_any = table.new_zeros(1, len(bases))
        each.weights.clear()
        each.weights[bases, dtype] = gathered(torch.cat([before_any, table[:, : len(bases)]]), 0)
    others = gathered(table[:, len(bases) :], ages.since) if table.shape[1] > len(bases) else []
    elapsed = [1 - base ** (ages.since + 1) for base in bases]
    return elapsed + [0.0] * len(others), [*each.weights[bases, dtype], *others]


# --- what a call moves


def _pieces(rule: UpdateRule, group: Group, each: Entries, compiles: bool) -> Iterator[_Piece]:
    """Yield a tensor in pieces: of some slices, or of all."""
    ages, chunked = each.ages, on_cpu(each.parameter)
    constants, weights = _weights(rule, group, each)
    few = chunked and ages.slice_size > 1 and ages.active <= FEW * ages.entries
    if ages.index is None and not few:
        active = ages.mask if ages.is_partial else None
        whole = _Piece(each.parameter, each.gradient, each.state, active, constants, weights)
        whole = _collapsed(whole)
        yield from _chunks(whole) if chunked and not compiles else [whole]
        return
    index = ages.active_slices()
    count = max(CHUNK // ages.slice_size, 1) if chunked else max(len(index), 1)
    for start in range(0, len(index), count):
        yield _gathered(each, index, slice(start, start + count), constants, weights)


def _gathered(
    each: Entries, index: Tensor, part: slice, constants: list[float], weights: list[Tensor | None]
) -> _Piece:
    """Return a piece of copies of some slices, of which state in the order of the index is none."""
    ages, places = each.ages, index[part]
    piece = _Piece(
        ages.taken(each.parameter, places), ages.taken(each.gradient, places), {}, None, constants, []
    )
    copies = [(each.parameter, piece.parameter)]
    for name, value in each.state.items():
        if ages.index is not None:
            piece.state[name] = value.view(-1, ages.slice_size)[part]
        else:
            piece.state[name] = ages.taken(value, places)
            copies.append((value, piece.state[name]))
    for weight in weights:
        if weight is not None and ages.index is not None:
            weight = weight[part]
        elif weight is not None:
            weight = ages.taken(weight.expand(ages.shape), places)
        piece.weights.append(weight)
    piece.write_back = [functools.partial(ages.put, value, places, copy) for value, copy in copies]
    return piece


def _collapsed(piece: _Piece) -> _Piece:
    """Return views with as few dimensions as all tensors allow, so that few shapes are compiled."""
    shape = piece.parameter.shape
    full = [piece.parameter, piece.gradient, *piece.state.values()]
    if not all(each.is_contiguous() for each in full):
        return piece
    coarse = [each for each in (piece.active, *piece.weights) if each is not None]
    sizes: list[list[int]] = []  # of all, and of each coarse tensor
    patterns: list[tuple[bool, ...]] = []
    for dim, size in enumerate(shape):
        pattern = tuple(each.shape[dim] == size for each in coarse)
        if size == 1:
            continue
        own = [size, *(each.shape[dim] for each in coarse)]
        if patterns and patterns[-1] == pattern:
            sizes[-1] = [a * b for a, b in zip(sizes[-1], own, strict=True)]
        else:
            sizes.append(own)
            patterns.append(pattern)
    merged = list(zip(*sizes, strict=True)) or [(1,)] * (1 + len(coarse))
    shapes = {id(each): own for each, own in zip(coarse, merged[1:], strict=True)}

    def view(each: Tensor | None) -> Tensor | None:
        return None if each is None else each.reshape(shapes.get(id(each), merged[0]))

    return _mapped(piece, view)


def _mapped(piece: _Piece, change: Callable[[Any], Any]) -> _Piece:
    state = {name: change(value) for name, value in piece.state.items()}
    return _Piece(
        change(piece.parameter),
        change(piece.gradient),
        state,
        change(piece.active),
        piece.constants,
        [change(weight) for weight in piece.weights],
        piece.write_back,
    )


def _chunks(piece: _Piece) -> Iterator[_Piece]:
    """Yield the piece in parts whose temporary values stay in a processor's cache."""
    if not piece.parameter.dim() or piece.parameter.numel() <= CHUNK:
        yield piece
        return
    rows = len(piece.parameter)
    count = max(CHUNK * rows // piece.parameter.numel(), 1)
    for start in range(0, rows, count):

        def cut(each: Tensor | None, part: slice = slice(start, start + count)) -> Tensor | None:
            return each if each is None or len(each) != rows else each[part]

        yield _mapped(piece, cut)


def _joined(pieces: Iterator[_Piece], most: int) -> Iterator[_Piece]:
    """Yield pieces of at most so many entries flat and joined, so that there are few calls."""
    alike: dict[Any, list[_Piece]] = {}
    entries: dict[Any, int] = {}
    for piece in pieces:
        size = piece.parameter.numel()
        if size > most:
            yield piece
            continue
        forms = [each if each is None else each.dtype for each in piece.tensors()]
        key = (*piece.constants, *piece.state, *forms)
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
    columns = zip(*(each.tensors() for each in pieces), strict=True)
    shapes = [each.parameter.shape for each in pieces]
    parameter, gradient, active, *others = [
        None
        if column[0] is None
        else torch.cat([each.expand(shape).reshape(-1) for each, shape in zip(column, shapes, strict=True)])
        for column in columns
    ]
    assert parameter is not None
    assert gradient is not None
    state = dict(zip(first.state, others, strict=False))
    joined = _Piece(parameter, gradient, state, active, first.constants, others[len(state) :])  # type: ignore[arg-type]
    sizes = [shape.numel() for shape in shapes]

    def split() -> None:
        targets = [[each.parameter for each in pieces], *([e.state[name] for e in pieces] for name in state)]
        for own, values in zip(targets, (parameter, *state.values()), strict=True):
            parts = zip(values.split(sizes), shapes, strict=True)  # type: ignore[union-attr]
            torch._foreach_copy_(own, [part.view(shape) for part, shape in parts])

    joined.write_back = [split, *(write for each in pieces for write in each.write_back)]
    return joined


# --- the call


def _call(rule: UpdateRule, settings: tuple[float, ...], piece: _Piece, compiles: bool) -> None:
    """Move a piece, by compiled code if it is to and can be compiled."""
    names = tuple(piece.state)
    tensors = (piece.parameter, piece.gradient, *piece.state.values())
    if compiles and "eager" not in _said:
        key, active = _kind(rule, piece), None if piece.active is None else piece.active.view(torch.uint8)
        # Numbers would be compiled in, so that a scheduler's next rate would recompile.
        constants: Any = torch.tensor([*settings, *piece.constants], dtype=torch.float64, device="cpu")
        constants = constants if piece.parameter.is_cpu else constants.unbind()
        try:
            _compiled(key)(rule, names, tensors, active, constants, piece.weights)
            return
        except RuntimeError as error:
            if key in _known and "recompile" not in str(error):
                raise
            _say_eager(error)
        finally:
            _known.add(key)
    numbers = [torch.tensor(each, dtype=torch.float64, device="cpu") for each in piece.constants]
    _move(rule, names, tensors, piece.active, (*settings, *numbers), piece.weights)


def _kind(rule: UpdateRule, piece: _Piece) -> Any:
    """Return what decides on a graph: a rule, and the forms of tensors."""
    order = sorted(range(piece.parameter.dim()), key=piece.parameter.stride)
    forms = [
        None if each is None else (each.dtype, *(size == 1 for size in each.shape))
        for each in piece.tensors()
    ]
    return type(rule), piece.parameter.device.type, *order, *piece.state, *forms


@functools.lru_cache(maxsize=256)
def _compiled(kind: Any) -> Callable[..., None]:
    """Return `_move`, compiled for tensors of any length and age."""
    if "compiled" not in _said:
        _said.add("compiled")
        _log.warning("torch.compile compiles the updates of masked entries, once, which takes a while")
    # Dynamo gives up after eight compilations of a code object, so each kind of call has its own.
    own = FunctionType(_move.__code__.replace(), globals())
    return torch.compile(own, dynamic=True, fullgraph=True, backend=BACKEND)


def _say_eager(error: Exception) -> None:
    _said.add("eager")
    line = " ".join(str(error).split())[:200]
    warn_user(
        "masked entries are updated by uncompiled code, which takes several times as long, since "
        f"torch.compile failed: {line}"
    )


def _move(
    rule: UpdateRule,
    names: tuple[str, ...],
    tensors: tuple[Tensor, ...],
    active: Tensor | None,
    constants: Any,
    weights: Sequence[Tensor | None],
) -> None:
    """Move active entries, in place: a parameter by its gradient, and its state."""
    parameter, gradient, *state = tensors
    constants = constants.unbind() if isinstance(constants, Tensor) else constants
    count = len(constants) - len(weights)
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    numbers = tuple(
        constant if weight is None else weight + constant * (1 - weight)
        for constant, weight in zip(constants[count:], weights, strict=True)
    )
    values = {name: value.to(dtype) for name, value in zip(names, state, strict=True)}
    new, updated = rule.update(parameter.to(dtype), gradient.to(dtype), values, constants[:count], numbers)
    # Of the forms of a mask, inductor vectorises this one.
    moves = active.float() > 0 if active is not None and active.dtype == torch.uint8 else active
    for old, value in ((parameter, new), *((state[names.index(n)], v) for n, v in updated.items())):
        value = value.to(old.dtype)
        # The result for frozen entries, whose gradients are arbitrary, is discarded.
        old.copy_(value if moves is None else torch.where(moves, value, old))
