"""Which entries are active, and how old their moments are, in one small code an entry.

Entries that thawed together share their age from then on: they form a *cohort*. A code names an entry's
cohort (its *slot*), and its sign says whether the entry is active:

    active:  code = slot + lowest    (lowest = -128 for int8; negative)
    frozen:  code = slot             (not negative)

An active slot keeps the clock at its birth, so that ages grow without anything being written; a frozen slot
keeps the age at which its entries paused. Only a change of the mask writes codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradpolicy.optim.jitted import moves as jitted

CODE_TYPES = (torch.int8, torch.int16, torch.int32)
CHUNK = 1 << 16
"""Entries handled at once where temporaries are needed: they stay in the cache."""
FAR_CHUNK = 1 << 24
"""The same on a GPU, where a call is dear and nothing stays in the cache."""

Pair = tuple[bool, bool, int]
"""What decides a new code: the new flag, whether the entry was active, its old slot."""


def chunk(device: torch.device) -> int:
    """Entries to handle at once on a device."""
    return CHUNK if device.type == "cpu" else FAR_CHUNK


def repeat(values: Tensor, times: int) -> Tensor:
    """Each value so many times, one behind the other."""
    return values.unsqueeze(1).expand(-1, times).reshape(-1) if times > 1 else values


def slot_index(codes: Tensor, width: int) -> Tensor:
    """Where each code stands in a table of [frozen or active][slot], flattened, `width` slots a side."""
    return (codes & torch.iinfo(codes.dtype).max).long() + width * (codes < 0)


def recode(codes: Tensor, mask: Tensor, table: Tensor) -> Tensor:
    """New codes from old codes and new flags.

    Args:
        codes: old codes (1-D), or one code for all.
        mask: new flags (bool, 1-D), or one flag for all.
        table: the new code for [new flag][frozen or active before][old slot], in the dtype of the new codes.
    """
    width = table.shape[-1]
    if codes.numel() == 1:
        off, on = table.view(2, -1)[:, int(slot_index(codes, width))].to(codes.device)
        return torch.where(mask, on, off)
    flat = table.reshape(-1).to(codes.device)
    result = torch.empty(codes.numel(), dtype=table.dtype, device=codes.device)
    for part, index in _pair_indices(codes, mask, width):
        torch.take(flat, index, out=result[part])
    return result


def pairs_present(codes: Tensor, mask: Tensor, width: int) -> list[Pair]:
    """The pairs that do occur in the tensor."""
    seen = jitted.pairs_seen(codes, mask, width)
    if seen is None:
        seen = torch.zeros(4 * width, dtype=torch.bool, device=codes.device)
        for _, index in _pair_indices(codes, mask, width):
            seen[index] = True
    found = seen.nonzero().flatten().tolist()
    return [(index >= 2 * width, index // width % 2 == 1, index % width) for index in found]


def _pair_indices(codes: Tensor, mask: Tensor, width: int):  # type: ignore[no-untyped-def]
    count = chunk(codes.device)
    for start in range(0, codes.numel(), count):
        part = slice(start, start + count)
        flags = mask if mask.numel() == 1 else mask[part]
        yield part, slot_index(codes[part], width) + 2 * width * flags


@dataclass(frozen=True)
class Slots:
    """The ages that codes stand for: `active[i]` and `frozen[i]` belong to slot i."""

    active: tuple[int, ...]
    frozen: tuple[int, ...]

    @property
    def most(self) -> int:
        """Slots on the fuller side."""
        return max(len(self.active), len(self.frozen))

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest code with room for them."""
        return next(dtype for dtype in CODE_TYPES if self.most <= torch.iinfo(dtype).max + 1)

    def table(self) -> Tensor:
        """Ages (int64) of [frozen or active][slot], flattened, as `slot_index` points into it."""
        table = torch.zeros(2, self.most, dtype=torch.int64, device="cpu")
        table[0, : len(self.frozen)] = torch.tensor(self.frozen, dtype=torch.int64, device="cpu")
        table[1, : len(self.active)] = torch.tensor(self.active, dtype=torch.int64, device="cpu")
        return table.view(-1)


class Cohorts:
    """Activity and ages of one parameter's entries, a code for each block of consecutive entries.

    Attributes:
        codes: 1-D tensor; `codes.numel() * block` entries in all.
        block: entries that one code governs: the whole tensor, a row, or one.
        clock: updates seen so far.
    """

    def __init__(self, size: int, age: int, device: torch.device) -> None:
        self.codes = torch.tensor([-128], dtype=torch.int8, device=device)
        self.block = size
        self.clock = 0
        self.births: list[int] = [-age]
        self.paused: list[int] = []
        self._rows: Tensor | None = None

    @classmethod
    def restored(cls, codes: Tensor, block: int, slots: Slots) -> Cohorts:
        """Cohorts as they were saved."""
        if codes.numel() == 1:
            codes, slots = _of_one_code(codes, slots)
        cohorts = cls(codes.numel() * block, 0, codes.device)
        cohorts.codes, cohorts.block = codes, block
        cohorts.births, cohorts.paused = [-age for age in slots.active], list(slots.frozen)
        return cohorts

    def tick(self) -> None:
        """Count one update: every active entry is one older."""
        self.clock += 1

    def restart(self) -> None:
        """Have every entry be of age 0."""
        self.births, self.paused = [self.clock] * len(self.births), [0] * len(self.paused)

    @property
    def any_age(self) -> bool:
        """Whether any slot has another age than 0."""
        return any(birth != self.clock for birth in self.births) or any(self.paused)

    @property
    def slots(self) -> Slots:
        """The ages now."""
        return Slots(tuple(self.clock - birth for birth in self.births), tuple(self.paused))

    @property
    def uniform(self) -> bool:
        """Whether the whole tensor shares one code."""
        return self.codes.numel() == 1

    def active(self) -> Tensor:
        """One flag a block."""
        return self.codes < 0

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held in memory."""
        return [self.codes] if self._rows is None else [self.codes, self._rows]

    def to(self, device: torch.device) -> None:
        """Move to another device."""
        self.codes, self._rows = self.codes.to(device), None

    def active_blocks(self) -> Tensor:
        """The active blocks' places (int64), found once a change of the mask."""
        if self._rows is None:
            self._rows = self.active().nonzero().view(-1)
        return self._rows

    def ages(self) -> Tensor:
        """One age (int64) a block."""
        slots = self.slots
        return slots.table().to(self.codes.device)[slot_index(self.codes, slots.most)]

    def change(self, mask: Tensor, block: int, forget: bool, apply: Callable[..., Tensor] = recode) -> None:
        """Take a new mask.

        Args:
            mask: one flag for each `block` entries (one flag alone for a whole tensor).
            block: entries that a flag governs.
            forget: whether freezing empties an entry's moments, so that its age returns to 0.
            apply: makes the new codes, as `recode` does.
        """
        size, self._rows = self.codes.numel() * self.block, None
        if not self.uniform and block < self.block:
            self.codes, self.block = repeat(self.codes, self.block // block), block
        if not self.uniform and mask.numel() > 1 and block > self.block:
            mask = repeat(mask, block // self.block)
        old = self.slots
        slots, table = _after(old, self._possible_pairs(mask), forget)
        if slots.dtype is not torch.int8 and not self.uniform:
            slots, table = _after(old, tuple(pairs_present(self.codes, mask, old.most)), forget)
        if len(slots.active) + len(slots.frozen) == 1:
            lowest = torch.iinfo(torch.int8).min
            self.codes = torch.tensor(
                [lowest if slots.active else 0], dtype=torch.int8, device=self.codes.device
            )
        else:
            mask = mask if self.uniform or mask.numel() > 1 else repeat(mask, self.codes.numel())
            self.codes = apply(self.codes, mask, table)
        self.block = size // max(self.codes.numel(), 1)
        self.take(slots)

    def transition(self, forget: bool) -> tuple[Slots, Tensor]:
        """The slots after any new mask of the same blocks, and the table that `recode` reads for it."""
        pairs = _all_pairs((False, True), len(self.paused), len(self.births))
        return _after(self.slots, pairs, forget)

    def take(self, slots: Slots) -> None:
        """Note that codes stand for these slots now."""
        self._rows = None
        self.births = [self.clock - age for age in slots.active]
        self.paused = list(slots.frozen)

    def thaw_code(self) -> int | None:
        """The byte code for entries that thaw with empty moments; None where bytes are used up.

        For codes of active entries alone, frozen ones being empty.
        """
        if self.codes.dtype is not torch.int8 or (self.clock not in self.births and len(self.births) > 127):
            return None
        if self.clock not in self.births:
            self.births.append(self.clock)
        return self.births.index(self.clock) - 128

    def _possible_pairs(self, mask: Tensor) -> tuple[Pair, ...]:
        """Every pair that could occur, judged without looking at the entries."""
        flags = (bool(mask),) if mask.numel() == 1 else (False, True)
        if self.uniform:
            return tuple((flag, bool(self.births), 0) for flag in flags)
        return _all_pairs(flags, len(self.paused), len(self.births))


@functools.lru_cache(maxsize=16)
def _all_pairs(flags: tuple[bool, ...], frozen: int, active: int) -> tuple[Pair, ...]:
    sides = [(False, frozen), (True, active)]
    return tuple((flag, side, slot) for flag in flags for side, count in sides for slot in range(count))


def _of_one_code(code: Tensor, slots: Slots) -> tuple[Tensor, Slots]:
    """The code and the age of a tensor that shares one, as its only slot."""
    active, age = bool(code < 0), int(slots.table()[slot_index(code, slots.most).cpu()])
    code = torch.tensor([-128 if active else 0], dtype=torch.int8, device=code.device)
    return code, Slots((age,), ()) if active else Slots((), (age,))


def _age_after(old: Slots, pair: Pair, forget: bool) -> int:
    flag, was_active, slot = pair
    if forget and not flag:
        return 0
    return old.active[slot] if was_active else old.frozen[slot]


@functools.lru_cache(maxsize=16)
def _after(old: Slots, pairs: tuple[Pair, ...], forget: bool) -> tuple[Slots, Tensor]:
    """The slots after a change and the table that `recode` reads, which many tensors may share."""
    slots = _slots_after(old, pairs, forget)
    return slots, _transition(old, slots, pairs, forget)


def _slots_after(old: Slots, pairs: Sequence[Pair], forget: bool) -> Slots:
    """The ages that entries have after a change, each once; where it can be, an age keeps its slot."""
    ordered = sorted(pairs, key=lambda pair: (pair[0] != pair[1], pair[2]))
    ages = [(pair[0], _age_after(old, pair, forget)) for pair in ordered]
    active, frozen = (dict.fromkeys(age for flag, age in ages if flag is side) for side in (True, False))
    return Slots(tuple(active), tuple(frozen))


def _transition(old: Slots, new: Slots, pairs: Sequence[Pair], forget: bool) -> Tensor:
    """The table that `recode` reads."""
    lowest, room = torch.iinfo(new.dtype).min, torch.iinfo(new.dtype).max + 1
    active = {age: lowest + slot for slot, age in enumerate(new.active)}
    frozen = {age: slot for slot, age in enumerate(new.frozen)}
    places: list[list[dict[int, int]]] = [[{}, {}], [{}, {}]]
    for pair in pairs:
        flag, was_active, slot = pair
        places[flag][was_active][slot] = (active if flag else frozen)[_age_after(old, pair, forget)]
    table: list[list[list[int]]] = [[[], []], [[], []]]
    for flag, was_active in ((False, False), (False, True), (True, False), (True, True)):
        known = places[flag][was_active]
        # What cannot occur is filled so that the table has the simplest form. A slot may stay what it was
        # only where the new codes, which may be narrower than the old ones, have room for it.
        first = lowest if was_active else 0
        other = next(iter(known.values()), 0)
        stays = room if flag == was_active else 0
        table[flag][was_active] = [
            known.get(slot, slot + first if slot < stays else other) for slot in range(old.most)
        ]
    return torch.tensor(table, dtype=new.dtype, device="cpu")
