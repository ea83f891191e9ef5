"""The mask and the ages of a parameter's entries, as tensors that broadcast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from gradpolicy.optim.shapes import CHUNK, in_parts

WIDE = torch.int32


@dataclass(frozen=True)
class Slices:
    """Some slices of a tensor: an index of its leading dimensions, and all of the others.

    Attributes:
        shape: Shape of the tensor.
        dims: Number of leading dimensions.
        index: Positions of the slices, in the order of the tensor.
    """

    shape: tuple[int, ...]
    dims: int
    index: Tensor

    @classmethod
    def of(cls, mask: Tensor, shape: tuple[int, ...], dims: int) -> Slices:
        """Return the slices that a mask leaves active."""
        flags = mask.expand(*shape[:dims], *(1,) * (len(shape) - dims))
        flat, dtype = flags.reshape(-1), torch.int32 if prod(shape) < 1 << 31 else torch.int64
        if not flat.is_cpu:
            return cls(shape, dims, flat.nonzero().view(-1).to(dtype))
        # NumPy finds them in a fraction of the time, and parts of 8 bytes a slice stay in the cache.
        found = [
            torch.from_numpy(np.flatnonzero(flat[start : start + CHUNK].numpy())).add_(start).to(dtype)
            for start in range(0, max(len(flat), 1), CHUNK)
        ]
        return cls(shape, dims, torch.cat(found))

    @property
    def size(self) -> int:
        """Number of entries in a slice."""
        return prod(self.shape[self.dims :])

    def take(self, values: Tensor) -> Tensor:
        """Return the values of the slices, a row each; of one number where a slice has one."""
        leading, rest = self.shape[: self.dims], values.shape[self.dims :]
        rows = values.expand(*leading, *rest).reshape(-1, prod(rest))
        if rows.shape[1] == 1:  # in a third of the time that rows of one take
            return rows.view(-1).index_select(0, self.index).view(-1, 1)
        return rows.index_select(0, self.index)

    def spread(self, rows: Tensor, start: float = 0.0) -> Tensor:
        """Return the values of all entries or, from a number for each of these slices, one for each slice.

        Args:
            rows: The values of these slices, in any shape.
            start: What other slices have.
        """
        rows, leading, rest = (
            rows.reshape(len(self.index), -1),
            self.shape[: self.dims],
            self.shape[self.dims :],
        )
        width = rows.shape[1]
        values = rows.new_full((prod(leading), width), start)
        if width > 1 or rows.dtype in (torch.bfloat16, torch.float16):  # whose NaN `scatter_` changes
            values.index_copy_(0, self.index.long(), rows)
        else:
            count = CHUNK if rows.is_cpu else len(rows)
            for first in range(0, len(rows), count):
                part = slice(first, first + count)
                values.view(-1).scatter_(0, self.index[part].long(), rows[part].view(-1))
        return values.view(*leading, *(rest if width == prod(rest) else (1,) * len(rest)))


@dataclass(eq=False)
class Ages:
    """Which entries of this process are active, and how many updates each has had.

    Attributes:
        shape: Shape of the entries, with a last dimension of 2 for complex parameters.
        active: Number of active entries.
        youngest: The least age of an active entry; each update counts it up.
        is_even: True if that is the age of all of them.
        others: Ages of frozen entries and, unless all active ones are of one age, what an active one has
            above the youngest: one number for all, or a tensor that broadcasts to the shape; with stored
            slices, a column with a number for each of them. Depends on ages and mask alone, so that a saved
            run goes on with the same bits.
        most: The greatest of these.
        flags: The mask (bool); None: the stored slices are the active ones.
        stored: The slices that alone have state, and of which other ages are 0; None: all have state.
    """

    shape: tuple[int, ...]
    active: int
    youngest: int
    is_even: bool
    others: int | Tensor
    most: int
    flags: Tensor | None = None
    stored: Slices | None = None

    @classmethod
    def all_active(cls, age: int, shape: tuple[int, ...], device: torch.device) -> Ages:
        """Return the ages of entries that are all active and of one age."""
        flags = torch.ones((1,) * len(shape), dtype=torch.bool, device=device)
        return cls(shape, prod(shape), age, True, 0, 0, flags)

    @classmethod
    def of(cls, signed: Tensor, mask: Tensor, shape: tuple[int, ...]) -> Ages:
        """Return the ages from signed numbers, see :meth:`signed`.

        Args:
            signed: The numbers.
            mask: The mask, which may be coarser.
            shape: Shape of the entries.
        """
        ages = signed.to(WIDE).abs() - 1
        coarse = ages[tuple(slice(size) for size in mask.shape)]
        ages = coarse if torch.equal(coarse.expand_as(ages), ages) else ages
        return _under(ages, mask, shape, torch.zeros_like(mask[(slice(1),) * mask.dim()]))

    # --- properties

    @cached_property
    def entries(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @property
    def is_partial(self) -> bool:
        """True if some entries are active and some are not."""
        return 0 < self.active < self.entries

    @property
    def device(self) -> torch.device:
        """The device of the mask."""
        return (self.stored.index if self.flags is None else self.flags).device  # type: ignore[union-attr]

    @property
    def one(self) -> int | None:
        """The age of all active entries; None if they differ."""
        return self.youngest if self.is_even else None

    @property
    def oldest(self) -> int:
        """No entry's age is above this."""
        return self.most + self.youngest

    @property
    def mask(self) -> Tensor:
        """The mask (bool), which broadcasts to the shape."""
        if self.flags is not None:
            return self.flags
        assert self.stored is not None
        return self.stored.spread(torch.ones_like(self.stored.index, dtype=torch.bool))

    @property
    def dims(self) -> int:
        """Leading dimensions that mask and ages tell apart; an entry's slice is all of the others."""
        if self.stored is not None:
            return self.stored.dims
        cutting = [each.shape for each in (self.flags, self.others) if isinstance(each, Tensor)]
        return max((dim + 1 for shape in cutting for dim, size in enumerate(shape) if size > 1), default=0)

    @property
    def bytes(self) -> int:
        """Memory of mask, ages and index."""
        tensors = (self.flags, self.others, None if self.stored is None else self.stored.index)
        return sum(each.nbytes for each in tensors if isinstance(each, Tensor))

    # --- ages

    def dense(self) -> Tensor:
        """Return the ages of all entries (int32), with every update counted in."""
        # Sums do not fit into the bytes of what is above the youngest.
        others = torch.as_tensor(self.others, dtype=WIDE, device=self.device)
        counted = self.youngest + (torch.zeros_like(others) if self.is_even else others)
        if self.stored is not None:
            return self.stored.spread(counted.expand(len(self.stored.index), 1))
        return torch.where(self.mask, counted, others)

    def signed(self) -> Tensor:
        """Return ages with the mask in them: ``a + 1`` of an active entry, ``-(a + 1)`` of a frozen one."""
        ages = self.dense() + 1
        narrow = self.oldest < torch.iinfo(torch.int16).max - 1
        return torch.where(self.mask, ages, -ages).to(torch.int16 if narrow else WIDE)

    def count(self) -> None:
        """Count one more update of the active entries."""
        self.youngest += 1

    def restarted(self) -> Ages:
        """Return the same mask with every age 0."""
        return replace(self, youngest=0, is_even=True, others=0, most=0)

    def to(self, device: torch.device) -> Ages:
        """Return the ages on another device."""
        others = self.others.to(device) if isinstance(self.others, Tensor) else self.others
        flags, stored = self.flags, self.stored
        flags = None if flags is None else flags.to(device)
        stored = None if stored is None else replace(stored, index=stored.index.to(device))
        return replace(self, others=others, flags=flags, stored=stored)

    # --- masks

    def is_mask(self, mask: Tensor) -> bool:
        """Return True if this mask is set."""
        count = int(mask.count_nonzero()) * (self.entries // max(mask.numel(), 1))
        return count == self.active and bool((self.mask == mask).all())

    def flips(self, other: Ages) -> Tensor:
        """Return the number of entries that are active in one and not in the other."""
        differ = self.mask != other.mask
        return differ.sum() * (self.entries // max(differ.numel(), 1))

    def turned(self, mask: Tensor, *, forget: bool = False) -> Ages:
        """Return the ages under another mask.

        Args:
            mask: Bool, of as many dimensions as the shape, to which it broadcasts.
            forget: True if frozen entries get age 0.
        """
        was, others = self.mask, self.others
        if self.stored is not None and isinstance(others, Tensor):
            others = self.stored.spread(others)
        elif not isinstance(others, Tensor):  # that of frozen entries
            others = ~was * torch.tensor(others, dtype=_dtype_for(others), device=was.device)
        return _under(others, mask, self.shape, was, self.youngest, forget)

    def active_slices(self) -> Slices:
        """Return the active entries as the largest slices that mask and ages do not cut."""
        return Slices.of(self.mask, self.shape, self.dims) if self.stored is None else self.stored

    def packed(self) -> Ages:
        """Return the ages with those of active slices only."""
        stored = self.active_slices()
        if self.is_even:
            return replace(self, others=0, most=0, flags=None, stored=stored)
        assert isinstance(self.others, Tensor)
        above = stored.take(self.others)
        most = int(above.max())
        return replace(self, others=above.to(_dtype_for(most)), most=most, flags=None, stored=stored)


def _under(
    ages: Tensor, mask: Tensor, shape: tuple[int, ...], was: Tensor, youngest: int = 0, forget: bool = False
) -> Ages:
    """Return the given ages under a mask.

    Args:
        ages: The ages, of which those of entries of the earlier mask are counted from the youngest.
        mask: The mask.
        shape: Shape of the entries.
        was: The earlier mask.
        youngest: The youngest age under that.
        forget: True if frozen entries get age 0.
    """
    entries = prod(shape)
    active = int(mask.count_nonzero()) * (entries // mask.numel()) if entries else 0
    if entries and not 0 < active < entries:
        mask = mask[(slice(1),) * mask.dim()]
    # Not the caller's, who may write to it.
    flags = mask.clone(memory_format=torch.contiguous_format)
    if not entries or (forget and not active):
        return Ages(shape, active, 0, True, 0, 0, flags)
    least, greatest, least_frozen, greatest_frozen = _ranges(ages, was, flags, youngest)
    if not active:
        least = greatest = 0
    if forget or active == entries:
        least_frozen = greatest_frozen = 0
    if least == greatest and least_frozen == greatest_frozen:
        return Ages(shape, active, least, True, greatest_frozen, greatest_frozen, flags)
    most = max(greatest - least, greatest_frozen)
    new_shape = [max(sizes) for sizes in zip(ages.shape, was.shape, flags.shape, strict=True)]
    new = torch.empty(new_shape, dtype=_dtype_for(most), device=flags.device)
    for part, some, before, now in in_parts(new, ages, was, flags):
        _count(part, some, before, now, youngest, least, forget)
    return Ages(shape, active, least, least == greatest, new, most, flags)


def _ranges(ages: Tensor, was: Tensor, now: Tensor, youngest: int) -> tuple[int, int, int, int]:
    """Return the least and the greatest age of active entries and of frozen ones, as far as there are any."""
    top, found = torch.iinfo(WIDE).max, []
    for some, before, active in in_parts(ages, was, now):
        counted = some.to(WIDE) + before.view(torch.uint8).to(WIDE).mul_(youngest)
        # Frozen entries become negative. With the other bits inverted, the least is the greatest.
        signed = counted ^ active.view(torch.uint8).to(WIDE).sub_(1)
        found += [*signed.aminmax(), *(signed ^ top).aminmax()]
    ends = torch.stack(found).view(-1, 4)
    low, high = torch.stack([ends.amin(0), ends.amax(0)]).tolist()
    return top - high[3], high[1], low[2] + top + 1, ~low[0]


def _count(
    new: Tensor, ages: Tensor, was: Tensor, now: Tensor, youngest: int, least: int, forget: bool
) -> None:
    """Write what active entries have above the least age, and the ages of frozen entries.

    Sums in one byte are right even if a term does not fit.
    """
    fitting = 0xFF if new.dtype == torch.uint8 else -1
    before, active = was.view(torch.uint8), now.view(torch.uint8)
    new.copy_(ages).add_(before, alpha=youngest & fitting).sub_(active, alpha=least & fitting)
    if forget:
        new.mul_(active)


def _dtype_for(age: int) -> torch.dtype:
    """Return the dtype of ages: one byte if they fit."""
    return torch.uint8 if age < 1 << 8 else WIDE
