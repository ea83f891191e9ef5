"""The mask and the ages of a parameter's entries, as tensors that broadcast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
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

    def spread_flags(self) -> Tensor:
        """Return the mask of which these are the active slices."""
        return self.spread_numbers(torch.ones((), dtype=torch.bool, device=self.index.device))

    def spread_numbers(self, numbers: Tensor) -> Tensor:
        """Return a number for each slice of the tensor, 0 for others, with dimensions that broadcast."""
        flat = numbers.new_zeros(prod(self.shape[: self.dims]))
        _scatter(flat, self.index, numbers.expand(self.index.shape))
        return flat.view(*self.shape[: self.dims], *(1,) * (len(self.shape) - self.dims))

    def take(self, values: Tensor) -> Tensor:
        """Return the values of the slices, a row each; of one entry where a value is that of a slice."""
        size = prod(values.shape[self.dims :])
        if values.is_contiguous() and values.shape[: self.dims] == self.shape[: self.dims]:
            # PyTorch takes single numbers in a third of the time that rows of one take.
            rows = values.view(-1) if size == 1 else values.view(-1, size)
            return rows.index_select(0, self.index).view(-1, size)
        places = torch.unravel_index(self.index.long(), self.shape[: self.dims])
        return values[places].reshape(-1, size)

    def put(self, values: Tensor, rows: Tensor) -> None:
        """Write the values of the slices."""
        if not values.is_contiguous():
            places = torch.unravel_index(self.index.long(), self.shape[: self.dims])
            values[places] = rows.view(-1, *self.shape[self.dims :])
        elif self.size == 1 and values.element_size() >= 4:  # it changes bits of NaN in bfloat16
            _scatter(values.view(-1), self.index, rows.view(-1))
        else:
            values.view(-1, self.size).index_copy_(0, self.index.long(), rows)

    def spread(self, rows: Tensor, start: float) -> Tensor:
        """Return the values of the slices as values of all entries, of which others get a start value."""
        values = rows.new_full(self.shape, start)
        self.put(values, rows.view(-1, self.size))
        return values


def _scatter(values: Tensor, index: Tensor, numbers: Tensor) -> None:
    """Write numbers to positions of a vector."""
    count = CHUNK if index.is_cpu else max(len(index), 1)
    for start in range(0, len(index), count):
        part = slice(start, start + count)
        values.scatter_(0, index[part].long(), numbers[part])


@dataclass(frozen=True)
class Ages:
    """Which entries of this process are active, and how many updates each has had: an immutable value.

    Attributes:
        shape: Shape of the entries, with a last dimension of 2 for complex parameters.
        mask_shape: The same with 1 where one flag of the mask is that of a whole dimension.
        active: Number of active entries.
        youngest: The least age of an active entry.
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
    mask_shape: tuple[int, ...]
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
        return _under(age, flags, shape)

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
        return _under(coarse if torch.equal(coarse.expand_as(ages), ages) else ages, mask, shape)

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
        return self.stored.spread_flags()[tuple(slice(size) for size in self.mask_shape)]

    @property
    def dims(self) -> int:
        """Leading dimensions that mask and ages tell apart; an entry's slice is all of the others."""
        if self.stored is not None:
            return self.stored.dims
        coarse = self.others.shape if isinstance(self.others, Tensor) else ()
        cut = [dim + 1 for each in (self.mask_shape, coarse) for dim, size in enumerate(each) if size > 1]
        return max(cut, default=0)

    @property
    def bytes(self) -> int:
        """Memory of mask, ages and index."""
        tensors = (self.flags, self.others, None if self.stored is None else self.stored.index)
        return sum(each.nbytes for each in tensors if isinstance(each, Tensor))

    # --- ages

    def dense(self) -> int | Tensor:
        """Return the ages of all entries, with every update counted in: a number where they have one."""
        # Sums do not fit into the bytes of what is above the youngest.
        above = 0 if self.is_even or isinstance(self.others, int) else self.others.to(WIDE)
        counted = above + self.youngest
        if self.stored is not None:
            return self.stored.spread_numbers(_as_tensor(counted, self.stored.index).view(-1))
        if not self.active:
            return self.others
        if self.is_even and isinstance(self.others, int) and self.others == self.youngest:
            return self.youngest
        if self.active == self.entries:
            return counted
        mask = self.mask
        return torch.where(mask, _as_tensor(counted, mask), _as_tensor(self.others, mask))

    def signed(self) -> Tensor:
        """Return ages with the mask in them: ``a + 1`` of an active entry, ``-(a + 1)`` of a frozen one."""
        mask = self.mask
        ages = _as_tensor(self.dense(), mask) + 1
        narrow = self.oldest < torch.iinfo(torch.int16).max - 1
        return torch.where(mask, ages, -ages).to(torch.int16 if narrow else WIDE)

    def counted(self) -> Ages:
        """Return the ages after one more update of the active entries."""
        others = (self.is_even, self.others, self.most, self.flags, self.stored)
        return Ages(self.shape, self.mask_shape, self.active, self.youngest + 1, *others)

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
        if int(mask.count_nonzero()) * (self.entries // max(mask.numel(), 1)) != self.active:
            return False
        present = self.mask
        return torch.equal(present, mask) if present.shape == mask.shape else bool((present == mask).all())

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
            others = self.stored.spread_numbers(others.view(-1))
        elif not isinstance(others, Tensor):  # that of frozen entries
            others = ~was * torch.tensor(others, dtype=_dtype_for(others), device=was.device)
        return _under(others, mask, self.shape, forget=forget, was=was, youngest=self.youngest)

    def active_slices(self) -> Slices:
        """Return the active entries as the largest slices that mask and ages do not cut."""
        return Slices.of(self.mask, self.shape, self.dims) if self.stored is None else self.stored

    def packed(self) -> Ages:
        """Return the ages with those of active slices only."""
        stored = self.active_slices()
        if self.is_even:
            return replace(self, others=0, most=0, flags=None, stored=stored)
        assert isinstance(self.others, Tensor)
        others, most = _simplest(stored.take(self.others.expand(self.shape))[:, :1])
        return replace(self, others=others, most=most, flags=None, stored=stored)


def _under(
    ages: int | Tensor,
    mask: Tensor,
    shape: tuple[int, ...],
    *,
    forget: bool = False,
    was: Tensor | None = None,
    youngest: int = 0,
) -> Ages:
    """Return the given ages under a mask.

    Args:
        ages: The ages, of which those of entries of the earlier mask are counted from the youngest.
        mask: The mask.
        shape: Shape of the entries.
        forget: True if frozen entries get age 0.
        was: The earlier mask; None: ages are complete.
        youngest: The youngest age under that.
    """
    entries = prod(shape)
    active = int(mask.count_nonzero()) * (entries // mask.numel()) if entries else 0
    if entries and not 0 < active < entries:
        mask = mask[(slice(1),) * mask.dim()]
    # Not the caller's, who may write to it.
    flags = mask.clone(memory_format=torch.contiguous_format)
    made = partial(Ages, shape, tuple(mask.shape), active, flags=flags)
    if not isinstance(ages, Tensor):
        frozen = 0 if forget else ages
        return made(ages if active else frozen, True, frozen, frozen)
    if not entries or (forget and not active):
        return made(0, True, 0, 0)
    if was is None:
        was = torch.zeros_like(flags[(slice(1),) * flags.dim()])
    least, greatest, least_frozen, greatest_frozen = _ranges(ages, was, flags, youngest)
    if not active:
        least = greatest = 0
    if forget or active == entries:
        least_frozen = greatest_frozen = 0
    if least == greatest and least_frozen == greatest_frozen:
        return made(least, True, greatest_frozen, greatest_frozen)
    most = max(greatest - least, greatest_frozen)
    new_shape = [max(sizes) for sizes in zip(ages.shape, was.shape, flags.shape, strict=True)]
    new = torch.empty(new_shape, dtype=_dtype_for(most), device=flags.device)
    for part, some, before, now in in_parts(new, ages, was, flags):
        _count(part, some, before, now, youngest, least, forget)
    return made(least, least == greatest, new, most)


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


def _as_tensor(ages: int | Tensor, like: Tensor) -> Tensor:
    """Return ages as a tensor of 32 bits."""
    return ages.to(WIDE) if isinstance(ages, Tensor) else torch.tensor(ages, dtype=WIDE, device=like.device)


def _simplest(ages: int | Tensor) -> tuple[int | Tensor, int]:
    """Return ages as one number if they are equal, else in as few bytes as they need; and the greatest."""
    if not isinstance(ages, Tensor):
        return ages, ages
    if not ages.numel():
        return 0, 0
    least, most = (int(each) for each in ages.aminmax())
    if least == most:
        return least, most
    return ages.to(_dtype_for(most)), most


def _dtype_for(age: int) -> torch.dtype:
    """Return the dtype of ages: one byte if they fit."""
    return torch.uint8 if age < 1 << 8 else WIDE
