"""The kernels for a GPU, in Triton: the exact Adam update, and the moves that masks need.

All work on flat vectors in memory order, a tile a program. Frozen entries are selected, never computed
on: what the arithmetic makes of them is thrown away before anything is written.

One launch updates many tensors. Each is a *job*, written down in ADDRESSES whole numbers, whose places are
named below. The NUMBERS that belong to a param group and an age come as arguments where all jobs share them,
so that nothing need be sent to the device from step to step.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import triton
import triton.language as tl

TILE = tl.constexpr(1024)
"""Entries a program; of held entries, those between two stored counts."""
WIDE = tl.constexpr(4096)
"""Entries a program of what reads single bytes alone."""

ADDRESSES = tl.constexpr(13)
PARAMETER, GRADIENT, FIRST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SECOND, LARGEST, CODES = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
INDEX = tl.constexpr(6)
"""Bits of held entries, or the rows to update."""
OFFSETS = tl.constexpr(7)
STEP = tl.constexpr(8)
"""A float32 to count up, or 0."""
SIZE = tl.constexpr(9)
"""Entries of the tensor, or rows to update."""
BLOCK = tl.constexpr(10)
OWN_NUMBERS = tl.constexpr(11)
"""Which of several sets of numbers is the job's."""
CORRECTIONS = tl.constexpr(12)
"""Where a job's pairs of corrections begin, counted in values."""

NUMBERS = tl.constexpr(9)
FACTOR, DECAY, SHRINK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
COMPLEMENT1, BETA2, COMPLEMENT2 = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
EPSILON = tl.constexpr(6)
STEP_SIZE, INVERSE_ROOT = tl.constexpr(7), tl.constexpr(8)
"""The corrections of a job with one slot."""


@dataclass(frozen=True)
class Kind:
    """What code an update is compiled to.

    Attributes:
        stored: type of parameters, gradients and moments.
        code: type of codes.
        aligned: whether every vector (and every row) begins at a multiple of 16 bytes.
        amsgrad: whether there is a maximum of second moments.
        coupled: whether weight decay goes through the gradient.
        many: whether corrections are looked up by code.
        shared: whether the numbers of all jobs are those given as arguments (not for float64).
        packed: whether moments and codes are of held entries alone.
        sparse: whether so few are active that memory is best read entry by entry.
        columns: entries of a row that a program takes; 0: codes are of single entries.
    """

    stored: tl.dtype
    code: tl.dtype
    aligned: bool
    amsgrad: bool
    coupled: bool
    many: bool
    shared: bool
    packed: bool
    sparse: bool
    columns: int

    def __repr__(self) -> str:
        # Part of the names that Triton gives to functions.
        return "_".join(str(field) for field in astuple(self))

    @property
    def computed(self) -> tl.dtype:
        """Half precision is computed in float32, as torch's fused Adam does."""
        return tl.float64 if self.stored == tl.float64 else tl.float32


# --- the update


@triton.jit(do_not_specialize=["corrections_at"])
def adam_entries(
    table, moving, corrections_at,
    factor, decay, shrink, complement1, beta2, complement2, epsilon, step_size, inverse_root,
    KIND: tl.constexpr, JOBS: tl.constexpr,
):  # fmt: skip
    """Update tensors that have a code an entry.

    Args:
        table: int64: the first program of each of JOBS jobs, then ADDRESSES of each job.
        moving: what is new at each step: sets of NUMBERS (float64), unless they are shared; for KIND.many,
            from `corrections_at` (counted in 8 bytes) on, pairs lr / (1 - b1^t) and 1 / sqrt(1 - b2^t) in the
            type to compute in.
        corrections_at: see `moving`.
        factor: what gradients are multiplied by; this and the others are the NUMBERS that are shared.
        decay: weight decay through the gradient.
        shrink: what parameters are multiplied by.
        complement1: 1 - b1.
        beta2: b2.
        complement2: 1 - b2.
        epsilon: eps.
        step_size: lr / (1 - b1^t).
        inverse_root: 1 / sqrt(1 - b2^t).
        KIND: a `Kind`.
        JOBS: a power of two.
    """
    given = (factor, decay, shrink, complement1, beta2, complement2, epsilon, step_size, inverse_root)
    tile, addresses = _job_of(table, JOBS, ADDRESSES)
    numbers = given if KIND.shared else _own_numbers(moving, addresses)
    corrections = _own_corrections(moving, corrections_at, addresses, KIND) if KIND.many else None
    _count_up(addresses, tile)
    size = tl.load(addresses + SIZE)
    # Only where nothing bounds a tile is memory read in pieces of 16 bytes.
    if tile * TILE + TILE <= size:
        _tile_of_entries(addresses, numbers, corrections, tile, size, False, KIND)
    else:
        _tile_of_entries(addresses, numbers, corrections, tile, size, True, KIND)


@triton.jit
def _tile_of_entries(addresses, numbers, corrections, tile, size, BOUNDED: tl.constexpr, KIND: tl.constexpr):
    positions = tile * TILE + tl.arange(0, TILE)
    inside = positions < size if BOUNDED else None
    if KIND.packed:
        bits = _pointer(addresses, INDEX, tl.uint8, False)
        before = tl.load(_pointer(addresses, OFFSETS, tl.int64, False) + tile)
        active = _held(bits, positions, positions < size)
        places = before + _rank(active)
        code = _load(_pointer(addresses, CODES, KIND.code, False) + places, active) if KIND.many else None
    else:
        code = _load(_pointer(addresses, CODES, KIND.code, KIND.aligned) + positions, inside)
        active = code < 0
        places = positions
    step_size, inverse_root = _corrections(numbers, corrections, code, active, KIND)
    reached = active if KIND.packed or KIND.sparse else inside
    _update(addresses, numbers, positions, places, active, reached, step_size, inverse_root, KIND)


@triton.jit(do_not_specialize=["corrections_at"])
def adam_rows(
    table, moving, corrections_at,
    factor, decay, shrink, complement1, beta2, complement2, epsilon, step_size, inverse_root,
    KIND: tl.constexpr, JOBS: tl.constexpr,
):  # fmt: skip
    """Update the listed rows of tensors that have a code a row; see `adam_entries`."""
    ROWS: tl.constexpr = TILE // KIND.columns
    given = (factor, decay, shrink, complement1, beta2, complement2, epsilon, step_size, inverse_root)
    tile, addresses = _job_of(table, JOBS, ADDRESSES)
    numbers = given if KIND.shared else _own_numbers(moving, addresses)
    corrections = _own_corrections(moving, corrections_at, addresses, KIND) if KIND.many else None
    _count_up(addresses, tile)
    size, block = tl.load(addresses + SIZE), tl.load(addresses + BLOCK)
    if KIND.aligned:
        block = tl.multiple_of(block, 16)
    across = tl.cdiv(block, KIND.columns)
    listed = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * KIND.columns + tl.arange(0, KIND.columns)
    row = tl.load(_pointer(addresses, INDEX, tl.int64, False) + listed, mask=listed < size, other=0)
    own = listed if KIND.packed else row
    inside = (listed < size)[:, None] & (column < block)[None, :]
    code = None
    if KIND.many:
        codes = _pointer(addresses, CODES, KIND.code, False)
        code = tl.load(codes + own, mask=listed < size, other=0)[:, None]
    step_size, inverse_root = _corrections(numbers, corrections, code, None, KIND)
    positions = row[:, None] * block + column[None, :]
    places = own[:, None] * block + column[None, :]
    _update(addresses, numbers, positions, places, inside, inside, step_size, inverse_root, KIND)


@triton.jit
def _update(
    addresses, numbers, positions, places, active, reached, step_size, inverse_root, KIND: tl.constexpr
):
    """One Adam step of the active entries.

    Args:
        addresses: the job's.
        numbers: the job's.
        positions: of the entries in parameter and gradient.
        places: of the entries in the moments.
        active: which entries to update.
        reached: which entries to read; None: all.
        step_size: lr / (1 - b1^t).
        inverse_root: 1 / sqrt(1 - b2^t).
        KIND: a `Kind`.
    """
    parameters = _pointer(addresses, PARAMETER, KIND.stored, KIND.aligned) + positions
    firsts = _pointer(addresses, FIRST, KIND.stored, KIND.aligned) + places
    seconds = _pointer(addresses, SECOND, KIND.stored, KIND.aligned) + places
    gradient = _load(_pointer(addresses, GRADIENT, KIND.stored, KIND.aligned) + positions, reached)
    parameter, first, second = _load(parameters, reached), _load(firsts, reached), _load(seconds, reached)

    TYPE: tl.constexpr = KIND.computed
    gradient = gradient.to(TYPE) * _number(numbers, FACTOR, KIND)
    if KIND.coupled:
        gradient += parameter.to(TYPE) * _number(numbers, DECAY, KIND)
    moment = first.to(TYPE)
    moment += (gradient - moment) * _number(numbers, COMPLEMENT1, KIND)
    square = second.to(TYPE) * _number(numbers, BETA2, KIND)
    square += gradient * gradient * _number(numbers, COMPLEMENT2, KIND)
    most = square
    if KIND.amsgrad:
        largests = _pointer(addresses, LARGEST, KIND.stored, KIND.aligned) + places
        largest = _load(largests, reached)
        most = tl.maximum(largest.to(TYPE), square, propagate_nan=tl.PropagateNan.ALL)
        _store(largests, most, largest, active, reached, KIND)
    divisor = _root(most) * inverse_root + _number(numbers, EPSILON, KIND)
    new = parameter.to(TYPE) * _number(numbers, SHRINK, KIND) - step_size * _quotient(moment, divisor)
    _store(firsts, moment, first, active, reached, KIND)
    _store(seconds, square, second, active, reached, KIND)
    _store(parameters, new, parameter, active, reached, KIND)


@triton.jit
def _corrections(numbers, corrections, code, active, KIND: tl.constexpr):
    """Step size and inverse root of each entry, or of all."""
    if KIND.many:
        slot = code.to(tl.int32) & (2 ** (KIND.code.primitive_bitwidth - 1) - 1)
        pairs = corrections + 2 * slot
        # Slots of frozen entries are none of the table's.
        step_size, inverse_root = _load(pairs, active), _load(pairs + 1, active)
    else:
        step_size, inverse_root = _number(numbers, STEP_SIZE, KIND), _number(numbers, INVERSE_ROOT, KIND)
    return step_size, inverse_root


@triton.jit
def _store(pointers, new, old, active, reached, KIND: tl.constexpr):
    """Write what is active; where memory is written in large pieces, the rest as it was."""
    if KIND.packed or KIND.sparse or KIND.columns:
        tl.store(pointers, new.to(old.dtype), mask=active)
    else:
        tl.store(pointers, tl.where(active, new.to(old.dtype), old), mask=reached)


@triton.jit
def _root(values):
    return tl.sqrt(values) if values.dtype == tl.float64 else tl.sqrt_rn(values)


@triton.jit
def _quotient(values, divisors):
    return values / divisors if values.dtype == tl.float64 else tl.div_rn(values, divisors)


@triton.jit
def _job_of(table, JOBS: tl.constexpr, FIELDS: tl.constexpr):
    """Which of a job's tiles this program works on, and where its FIELDS begin."""
    tile = tl.program_id(0).to(tl.int64)
    job = 0
    if JOBS > 1:
        job = tl.sum((tl.load(table + tl.arange(0, JOBS)) <= tile).to(tl.int32), 0) - 1
        tile -= tl.load(table + job)
    return tile, table + JOBS + job * FIELDS


@triton.jit
def _own_numbers(moving, addresses):
    return moving.to(tl.pointer_type(tl.float64)) + tl.load(addresses + OWN_NUMBERS) * NUMBERS


@triton.jit
def _own_corrections(moving, corrections_at, addresses, KIND: tl.constexpr):
    corrections = (moving.to(tl.pointer_type(tl.int64)) + corrections_at).to(tl.pointer_type(KIND.computed))
    return corrections + tl.load(addresses + CORRECTIONS)


@triton.jit
def _number(numbers, WHICH: tl.constexpr, KIND: tl.constexpr):
    return numbers[WHICH] if KIND.shared else tl.load(numbers + WHICH).to(KIND.computed)


@triton.jit
def _count_up(addresses, tile):
    """Count the tensor's step up, once."""
    if tile == 0:
        step = tl.load(addresses + STEP)
        tl.atomic_add(step.to(tl.pointer_type(tl.float32)), 1.0, mask=step != 0)


@triton.jit
def _pointer(addresses, WHICH: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(addresses + WHICH).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)


# --- bits of held entries


@triton.jit
def _held(bits, positions, inside):
    """Whether each entry is held."""
    byte = _load(bits + positions // 8, inside).to(tl.int32)
    return ((byte >> (positions % 8).to(tl.int32)) & 1) != 0


@triton.jit
def _rank(flags):
    """How many flags come before each."""
    ones = flags.to(tl.int32)
    return tl.cumsum(ones, 0) - ones


INDEXED = tl.constexpr(6)
NEW_FLAGS, KNOWN, HOW_MANY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BITS_TO, COUNTS_TO, ANSWER = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
"""What is written down of flags to index: addresses, how many, and where the answer goes."""


@triton.jit
def index_many(
    table, seen, COMPARED: tl.constexpr, BELOW_ZERO: tl.constexpr, JOBS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Eight flags (or codes, held below 0) a byte, the first in the lowest bit, and how many a tile.

    Args:
        table: int64: the first program of each of JOBS jobs, then INDEXED numbers of each.
        seen: int64, 0 at first, a pair for each job: to these is added how many flags are set, and how many
            bytes are not those known.
        COMPARED: whether to look at the bits that are known.
        BELOW_ZERO: whether codes tell.
        JOBS: a power of two.
        ALIGNED: whether flags begin at multiples of 16 bytes.
    """
    tile, own = _job_of(table, JOBS, INDEXED)
    size = tl.load(own + HOW_MANY)
    byte, bit = tl.arange(0, TILE // 8), tl.arange(0, 8)
    positions = tile * TILE + byte[:, None] * 8 + bit[None, :]
    value = tl.load(_pointer(own, NEW_FLAGS, tl.int8, ALIGNED) + positions, mask=positions < size, other=0)
    held = (value < 0 if BELOW_ZERO else value != 0).to(tl.int32)
    places = tile * (TILE // 8) + byte
    bits = tl.sum(held << bit[None, :], 1)
    tl.store(_pointer(own, BITS_TO, tl.uint8, False) + places, bits.to(tl.uint8), mask=places * 8 < size)
    counts, count = _pointer(own, COUNTS_TO, tl.int64, False), tl.sum(tl.sum(held, 1), 0).to(tl.int64)
    tl.store(counts, 0, mask=tile == 0)
    tl.store(counts + tile + 1, count)
    answer = seen + tl.load(own + ANSWER)
    tl.atomic_add(answer, count)
    if COMPARED:
        known = tl.load(_pointer(own, KNOWN, tl.uint8, False) + places, mask=places * 8 < size, other=0)
        others = tl.sum((known.to(tl.int32) != bits).to(tl.int32), 0)
        tl.atomic_add(answer + 1, others.to(tl.int64))


MOVED = tl.constexpr(8)
OLD, NEW, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
OLD_BEFORE, NEW_BEFORE = tl.constexpr(3), tl.constexpr(4)
FROM, TO, NEWCOMER = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
"""What is written down of values to move: bits of the entries in them, and of those in the result; entries of
the whole tensor; how many of either come before each tile; values and result; and what newcomers get."""


@triton.jit
def move_many(table, TYPE: tl.constexpr, FROM_ALL: tl.constexpr, TO_ALL: tl.constexpr, JOBS: tl.constexpr):
    """Bring values of the entries held before to the places of those held now.

    Args:
        table: int64: the first program of each of JOBS jobs, then MOVED numbers of each.
        TYPE: whole numbers as wide as the values.
        FROM_ALL: the values are of every entry.
        TO_ALL: the results are of every entry.
        JOBS: a power of two.
    """
    tile, own = _job_of(table, JOBS, MOVED)
    positions = tile * TILE + tl.arange(0, TILE)
    inside = positions < tl.load(own + WHOLE)
    wanted, places = inside, positions
    if not TO_ALL:
        wanted = _held(_pointer(own, NEW, tl.uint8, False), positions, inside)
        places = tl.load(_pointer(own, NEW_BEFORE, tl.int64, False) + tile) + _rank(wanted)
    had, sources = inside, positions
    if not FROM_ALL:
        had = _held(_pointer(own, OLD, tl.uint8, False), positions, inside)
        sources = tl.load(_pointer(own, OLD_BEFORE, tl.int64, False) + tile) + _rank(had)
    value = tl.load(_pointer(own, FROM, TYPE, False) + sources, mask=had & wanted, other=0)
    newcomer = tl.load(own + NEWCOMER).to(TYPE)
    tl.store(_pointer(own, TO, TYPE, False) + places, tl.where(had, value, newcomer), mask=wanted)


# --- flags and codes


@triton.jit
def survey(flags, codes, result, size, COMPARED: tl.constexpr):
    """Count flags that are set, and those that differ from what is in force.

    Args:
        flags: a byte an entry.
        codes: what is in force.
        result: int64, 0 and 0 at first: to both is added.
        size: entries.
        COMPARED: whether to look at `codes`.
    """
    positions = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = positions < size
    flag = tl.load(flags + positions, mask=inside, other=0) != 0
    tl.atomic_add(result, tl.sum(flag.to(tl.int32), 0).to(tl.int64))
    if COMPARED:
        active = _load(codes + positions, inside) < 0
        tl.atomic_add(result + 1, tl.sum((flag != active).to(tl.int32), 0).to(tl.int64))


FLAGGED = tl.constexpr(4)
OWN_CODES, OWN_FLAGS, COUNT, RESULT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""What is written down of codes and flags of many tensors: addresses, how many, and where the result goes."""


@triton.jit
def survey_many(table, result, JOBS: tl.constexpr, ALIGNED: tl.constexpr):
    """`survey` of many codes (bytes) and flags, a pair of numbers each; see `adam_entries` for the table."""
    tile, own = _job_of(table, JOBS, FLAGGED)
    counts = result + tl.load(own + RESULT)
    if tile * TILE + TILE <= tl.load(own + COUNT):
        _survey_tile(own, counts, tile, False, ALIGNED)
    else:
        _survey_tile(own, counts, tile, True, ALIGNED)


@triton.jit
def _survey_tile(own, counts, tile, BOUNDED: tl.constexpr, ALIGNED: tl.constexpr):
    codes, flags, inside = _flagged(own, tile, BOUNDED, ALIGNED)
    # Beyond the end both are 0: frozen.
    flag, active = _load(flags, inside) != 0, _load(codes, inside) < 0
    tl.atomic_add(counts, tl.sum(flag.to(tl.int32), 0).to(tl.int64))
    tl.atomic_add(counts + 1, tl.sum((flag != active).to(tl.int32), 0).to(tl.int64))


@triton.jit
def recode_many(table, by_code, width, JOBS: tl.constexpr, ALIGNED: tl.constexpr):
    """`recode` of many codes (bytes) in place."""
    tile, own = _job_of(table, JOBS, FLAGGED)
    if tile * TILE + TILE <= tl.load(own + COUNT):
        _recode_tile(own, by_code, width, tile, False, ALIGNED)
    else:
        _recode_tile(own, by_code, width, tile, True, ALIGNED)


@triton.jit
def _recode_tile(own, by_code, width, tile, BOUNDED: tl.constexpr, ALIGNED: tl.constexpr):
    codes, flags, inside = _flagged(own, tile, BOUNDED, ALIGNED)
    flag, code = _load(flags, inside).to(tl.int32), _load(codes, inside).to(tl.int32)
    index = (code & 127) + width * (code < 0).to(tl.int32) + 2 * width * flag
    new = _load(by_code + index, inside)
    if BOUNDED:
        tl.store(codes, new, mask=inside)
    else:
        tl.store(codes, new)


@triton.jit
def _flagged(own, tile, BOUNDED: tl.constexpr, ALIGNED: tl.constexpr):
    positions = tile * TILE + tl.arange(0, TILE)
    codes = _pointer(own, OWN_CODES, tl.int8, ALIGNED) + positions
    flags = _pointer(own, OWN_FLAGS, tl.uint8, ALIGNED) + positions
    return codes, flags, positions < tl.load(own + COUNT) if BOUNDED else None


@triton.jit
def recode(codes, flags, table, result, size, width, OLD_BITS: tl.constexpr):
    """Look new codes up in [new flag][frozen or active before][old slot]; `result` may be `codes`."""
    positions = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = positions < size
    code = tl.load(codes + positions, mask=inside, other=0).to(tl.int32)
    flag = tl.load(flags + positions, mask=inside, other=0).to(tl.int32)
    slot = code & (2 ** (OLD_BITS - 1) - 1)
    index = slot + width * (code < 0).to(tl.int32) + 2 * width * flag
    tl.store(result + positions, tl.load(table + index, mask=inside, other=0), mask=inside)


CLEARED = tl.constexpr(4)
VALUES, ACTIVE, ENTRIES, EACH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""What is written down of values to zero: their and the flags' addresses, how many, and how many a flag."""


@triton.jit
def clear_many(
    table, TYPE: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr, SINGLE: tl.constexpr,
    JOBS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Zero the entries of many tensors that are not active; see `adam_entries` for the table.

    Args:
        table: int64: the first program of each of JOBS jobs, then CLEARED numbers of each.
        TYPE: whole numbers as wide as the values.
        CODE: type of codes, below 0 where entries are active; None: flags or bits tell.
        BITS: whether bits do.
        SINGLE: whether all flags are of one entry.
        JOBS: a power of two.
        ALIGNED: whether all begins at a multiple of 16 bytes.
    """
    tile, own = _job_of(table, JOBS, CLEARED)
    if tile * TILE + TILE <= tl.load(own + ENTRIES):
        _clear_tile(own, tile, False, TYPE, CODE, BITS, SINGLE, ALIGNED)
    else:
        _clear_tile(own, tile, True, TYPE, CODE, BITS, SINGLE, ALIGNED)


@triton.jit
def _clear_tile(
    own, tile, BOUNDED: tl.constexpr, TYPE: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr,
    SINGLE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    positions = tile * TILE + tl.arange(0, TILE)
    inside = positions < tl.load(own + ENTRIES) if BOUNDED else None
    places = positions if SINGLE else positions // tl.load(own + EACH)
    if BITS:
        active = _held(_pointer(own, ACTIVE, tl.uint8, ALIGNED), places, inside)
    elif CODE is None:
        active = _load(_pointer(own, ACTIVE, tl.uint8, ALIGNED) + places, inside) != 0
    else:
        active = _load(_pointer(own, ACTIVE, CODE, ALIGNED) + places, inside) < 0
    values = _pointer(own, VALUES, TYPE, ALIGNED) + positions
    cleared = (active == 0) & inside if BOUNDED else active == 0
    tl.store(values, tl.zeros((TILE,), TYPE), mask=cleared)
