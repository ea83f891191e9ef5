"""The loops over entries that numba compiles where there is no C compiler: arithmetic, no bookkeeping.

Vectors are flat NumPy arrays. bfloat16, which NumPy lacks, comes as uint16, and float16 as int16. Positions
are unsigned, so that none is asked whether it counts from the end, and loops are short and simple, so that
LLVM turns them into vector instructions.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradpolicy.machinery.jitting import loop
from gradpolicy.optim.native.moves import GRAIN

TILE = 512
"""Entries whose corrections are looked up at once: with their moments they stay in the first-level cache."""


# --- values


@intrinsic
def choose(_context: Any, sign: Any, new: Any, old: Any) -> Any:
    """The bits of `new` where `sign` is below 0, else those of `old`.

    Written as bit operations: of a choice LLVM makes masked stores, which some processors are slow at.
    """

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        sign, new, old = arguments
        whole = ir.IntType(8 * _bytes(old.type))
        narrows = sign.type.width > whole.width
        sign = (builder.trunc if narrows else builder.sext)(sign, whole)
        mask = builder.ashr(sign, ir.Constant(whole, whole.width - 1))
        bits = builder.bitcast(old, whole)
        differ = builder.xor(bits, builder.bitcast(new, whole))
        return builder.bitcast(builder.xor(bits, builder.and_(differ, mask)), old.type)

    return old(sign, old, old), generate


def _bytes(kind: Any) -> int:
    if isinstance(kind, ir.IntType):
        return kind.width // 8
    return 4 if isinstance(kind, ir.FloatType) else 8


@intrinsic
def popcount(_context: Any, word: Any) -> Any:
    """How many bits of a word are set."""
    return word(word), lambda _context, builder, _signature, arguments: builder.ctpop(arguments[0])


@intrinsic
def lowest(_context: Any, word: Any) -> Any:
    """The place of a word's lowest bit that is set."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return word(word), generate


@intrinsic
def widen(_context: Any, stored: Any) -> Any:
    """A stored value as a number to compute with."""

    def bfloat(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        wide = builder.shl(builder.zext(arguments[0], word), ir.Constant(word, 16))
        return builder.bitcast(wide, ir.FloatType())

    def half(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    if stored == types.uint16:
        return types.float32(stored), bfloat
    if stored == types.int16:
        return types.float32(stored), half
    return stored(stored), lambda _context, _builder, _signature, arguments: arguments[0]


@intrinsic
def narrow(_context: Any, value: Any, stored: Any) -> Any:
    """A number as what `stored` is kept as, to nearest, ties to even."""

    def bfloat(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        last = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.add(bits, builder.add(last, ir.Constant(word, 0x7FFF)))
        rounded = builder.lshr(rounded, ir.Constant(word, 16))
        whole = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.trunc(builder.select(whole, ir.Constant(word, 0x7FC0), rounded), ir.IntType(16))

    def half(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    if stored == types.uint16:
        return stored(value, stored), bfloat
    if stored == types.int16:
        return stored(value, stored), half
    return stored(stored, stored), lambda _context, _builder, _signature, arguments: arguments[0]


# --- Adam


@loop
def _byte(bits, at, k):  # type: ignore[no-untyped-def]
    return np.uint64(bits[at + np.uintp(k)]) << np.uint64(8 * k)


@loop
def _word(bits, base, stop):  # type: ignore[no-untyped-def]
    """Which of 64 entries are held; no bits: all."""
    at, left, held = np.uintp(base // 8), stop - base, np.uint64(0)
    if not len(bits):
        held = ~held
    elif left >= 64:  # written out, LLVM makes one load of it
        low = _byte(bits, at, 0) | _byte(bits, at, 1) | _byte(bits, at, 2) | _byte(bits, at, 3)
        return low | _byte(bits, at, 4) | _byte(bits, at, 5) | _byte(bits, at, 6) | _byte(bits, at, 7)
    else:
        for k in range((left + 7) // 8):
            held |= _byte(bits, at, k)
    return held if left >= 64 else held & ((np.uint64(1) << np.uint64(left)) - np.uint64(1))


@loop
def _update(parameter, gradient, at, moments, own_at, codes, code_at, sizes, inverses, numbers, count):  # type: ignore[no-untyped-def]
    """Adam for `count` entries, as `adam`: those from `at` on, whose moments and codes begin elsewhere."""
    one_beta1, beta2, one_beta2, eps = numbers[0], numbers[1], numbers[2], numbers[3]
    shrink, decay, factor = numbers[4], numbers[5], numbers[6]
    for i in range(np.uintp(count)):
        here, own, sign = at + i, own_at + i, codes[code_at + i]
        value, first, second = parameter[here], moments[0][own], moments[1][own]
        slope = widen(gradient[here]) * factor
        if decay != 0:
            slope += widen(value) * decay
        new_first = widen(first) + (slope - widen(first)) * one_beta1
        new_second = widen(second) * beta2 + slope * slope * one_beta2
        top = new_second
        if len(moments) == 3:
            largest = moments[2][own]
            before = widen(largest)
            top = before if before >= new_second or before != before else new_second
            moments[2][own] = choose(sign, narrow(top, largest), largest)
        step = sizes[i] * new_first / (np.sqrt(top) * inverses[i] + eps)
        new_value = widen(value) * shrink - step
        # All choices here: where a function makes one of its own, LLVM turns it into a masked store.
        parameter[here] = choose(sign, narrow(new_value, value), value)
        moments[0][own] = choose(sign, narrow(new_first, first), first)
        moments[1][own] = choose(sign, narrow(new_second, second), second)


@loop
def _slot(codes, at):  # type: ignore[no-untyped-def]
    return np.uintp(codes[at]) & np.uintp((1 << (8 * codes.itemsize - 1)) - 1)


@loop
def _look_up(codes, at, table, sizes, inverses, count):  # type: ignore[no-untyped-def]
    """The corrections of each entry."""
    for i in range(np.uintp(count)):
        slot = _slot(codes, at + i)
        sizes[i], inverses[i] = table[slot, 0], table[slot, 1]


@loop
def _any_active(codes, at, count):  # type: ignore[no-untyped-def]
    least = codes[at]
    for i in range(np.uintp(count)):
        least = min(least, codes[at + i])
    return least < 0


@loop
def _corrections(table):  # type: ignore[no-untyped-def]
    """Room for the corrections of a tile, filled with those of the first slot."""
    return np.full(TILE, table[0, 0]), np.full(TILE, table[0, 1])


@loop
def adam(parameter, gradient, moments, codes, table, numbers, start, stop):  # type: ignore[no-untyped-def]
    """Entries start..stop-1 of a tensor that has a code and moments for each.

    Args:
        parameter: all entries; so is `gradient`.
        gradient: gradients.
        moments: two, or three with AMSGrad.
        codes: a cohort code an entry.
        table: step size and inverse root of each slot; one row alone goes for all.
        numbers: see `_numbers` of adam.py.
        start: the first entry.
        stop: the entry after the last.
    """
    sizes, inverses = _corrections(table)
    for base in range(start, stop, TILE):
        at, count = np.uintp(base), min(TILE, stop - base)
        if _any_active(codes, at, count):
            if len(table) > 1:
                _look_up(codes, at, table, sizes, inverses, count)
            _update(parameter, gradient, at, moments, at, codes, at, sizes, inverses, numbers, count)


@loop
def adam_rows(parameter, gradient, moments, codes, table, numbers, rows, block, packed, start, stop):  # type: ignore[no-untyped-def]
    """The rows that `rows[start:stop]` names, of `block` entries each; as `adam`.

    With `packed` there are codes and moments for the named rows alone.
    """
    sizes, inverses = _corrections(table)
    active, zero = np.full(TILE, np.int8(-1)), np.uintp(0)
    for index in range(start, stop):
        row, own = np.uintp(rows[index]), np.uintp(index if packed else rows[index])
        if len(table) > 1:
            slot = _slot(codes, own)
            sizes[:block], inverses[:block] = table[slot, 0], table[slot, 1]
        for inside in range(0, block, TILE):
            at, own_at = row * np.uintp(block) + np.uintp(inside), own * np.uintp(block) + np.uintp(inside)
            count = min(TILE, block - inside)
            _update(parameter, gradient, at, moments, own_at, active, zero, sizes, inverses, numbers, count)


@loop
def adam_held(parameter, gradient, moments, codes, table, numbers, bits, offsets, start, stop):  # type: ignore[no-untyped-def]
    """The entries among start..stop-1 whose bit is set, which alone have codes and moments; as `adam`.

    `start` is a multiple of GRAIN, and `offsets` tell how many entries are held before each.
    """
    sizes, inverses = _corrections(table)
    active, zero = np.full(TILE, np.int8(-1)), np.uintp(0)
    places = np.empty(TILE, np.uintp)
    values, slopes = np.empty(TILE, parameter.dtype), np.empty(TILE, gradient.dtype)
    own_at, count = np.uintp(offsets[start // GRAIN]), zero
    for base in range(start, stop, 64):
        word = _word(bits, base, stop)
        while word:
            at = np.uintp(base) + lowest(word)
            places[count], values[count], slopes[count] = at, parameter[at], gradient[at]
            count += np.uintp(1)
            word &= word - np.uint64(1)
        if count <= TILE - 64 and base + 64 < stop:
            continue
        if len(table) > 1:
            _look_up(codes, own_at, table, sizes, inverses, count)
        _update(values, slopes, zero, moments, own_at, active, zero, sizes, inverses, numbers, count)
        for i in range(count):
            parameter[places[i]] = values[i]
        own_at, count = own_at + count, zero


# --- codes and flags


@loop
def recode(codes, mask, table, result, start, stop):  # type: ignore[no-untyped-def]
    """New codes from old ones (unsigned) and flags (0 or 1), by a table of [flag][old code]."""
    for index in range(start, stop):
        at = np.uintp(index)
        result[at] = table[mask[at], codes[at]]


@loop
def mark(codes, mask, seen, start, stop):  # type: ignore[no-untyped-def]
    """Mark the places of such a table that are asked for."""
    for index in range(start, stop):
        at = np.uintp(index)
        seen[mask[at], codes[at]] = True


@loop
def clear(values, active, shift, start, stop):  # type: ignore[no-untyped-def]
    """Zero values (whole numbers) where bit 7 of `active`, moved by `shift`, is not set."""
    zero = values.dtype.type(0)
    for index in range(start, stop):
        at = np.uintp(index)
        values[at] = choose(np.int8(active[at] << shift), values[at], zero)


@loop
def pack_bits(flags, shift, bits, counts, start, stop):  # type: ignore[no-untyped-def]
    """Bit `shift` of each byte, eight a byte, and how many are set in each GRAIN."""
    lowest, gather = np.uint64(0x0101010101010101), np.uint64(0x0102040810204080)
    words = flags[: len(flags) // 8 * 8].view(np.uint64)
    for index in range(start // 8, min(stop // 8, len(words))):
        # The product gathers the lowest bit of each byte.
        word = (words[index] >> np.uint64(shift)) & lowest
        byte = np.uint8((word * gather) >> np.uint64(56))
        bits[index] = byte
        counts[8 * index // GRAIN] += popcount(np.uint64(byte))
    for at in range(max(start, 8 * len(words)), stop):
        flag = np.uint8((flags[at] >> shift) & 1)
        bits[at // 8] |= np.uint8(flag << (at % 8))
        counts[at // GRAIN] += flag


# --- values of held entries


@loop
def _repack_part(old_bits, new_bits, sources, source, results, target, newcomer, first, end):  # type: ignore[no-untyped-def]
    """Entries first..end-1, which are held from `source` on, and afterwards from `target` on."""
    source, target, one = np.uintp(source), np.uintp(target), np.uint64(1)
    for base in range(first, end, 64):
        had, wanted = _word(old_bits, base, end), _word(new_bits, base, end)
        stays, coming = had & wanted, popcount(wanted)
        for k in range(len(sources)):
            for i in range(coming):
                results[k][target + i] = newcomer
        while stays:
            lower = (stays & (~stays + one)) - one  # all bits below the lowest
            for k in range(len(sources)):
                results[k][target + popcount(wanted & lower)] = sources[k][source + popcount(had & lower)]
            stays &= stays - one
        source += popcount(had)
        target += coming


@loop
def repack(old, new, sources, results, copies, copy_at, newcomer, size, backwards, start, stop):  # type: ignore[no-untyped-def]
    """Move values between sets of held entries, for GRAINs start..stop-1.

    Args:
        old: bits and offsets of the entries held before; empty: all.
        new: those held afterwards.
        sources: vectors of one type that are moved alike.
        results: as many.
        copies: as many, of the values that are not to be read in `sources`.
        copy_at: where those of each GRAIN begin, below 0 for the others; empty: there are none.
        newcomer: value of entries that were not held.
        size: entries of the whole tensor.
        backwards: whether to begin with the last.
        start: the first GRAIN.
        stop: the GRAIN after the last.
    """
    for turn in range(start, stop):
        part = start + stop - 1 - turn if backwards else turn
        first, end = part * GRAIN, min((part + 1) * GRAIN, size)
        source = old[1][part] if len(old[0]) else first
        target = new[1][part] if len(new[0]) else first
        if len(copy_at) and copy_at[part] >= 0:
            _repack_part(old[0], new[0], copies, copy_at[part], results, target, newcomer, first, end)
        else:
            _repack_part(old[0], new[0], sources, source, results, target, newcomer, first, end)
