"""The mask and the ages of a parameter's entries, as tensors that broadcast."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

NARROW, WIDE = torch.int16, torch.int32


@dataclass(frozen=True)
class Ages:
    """Which entries of this process are active, and how many updates each has had: an immutable value.

    With an index, entries have state in the order of the index only, and a frozen one has age 0.

    Attributes:
        shape: Shape of the entries, with a last dimension of 2 for complex parameters.
        mask_shape: The same with 1 where one flag of the mask is that of a whole dimension.
        before: Ages as the mask was set: one number for all, or a tensor that broadcasts to the shape; with
            an index, a column with an age for each of its slices.
        most: The greatest of these.
        active: Number of active entries.
        since: Updates of the active entries since then.
        flags: The mask (bool); None: the index has it.
        index: Positions of the active slices, which are all that have state.
        dims: With an index, its `slice_dims`.
    """

    shape: tuple[int, ...]
    mask_shape: tuple[int, ...]
    before: int | Tensor
    most: int
    active: int
    since: int = 0
    flags: Tensor | None = None
    index: Tensor | None = None
    dims: int | None = None

    @classmethod
    def all_active(cls, age: int, shape: tuple[int, ...], device: torch.device) -> Ages:
        """Return the ages of entries that are all active and of one age."""
        flags = torch.ones((1,) * len(shape), dtype=torch.bool, device=device)
        return cls(shape, tuple(flags.shape), age, age, prod(shape), flags=flags)

    @classmethod
    def of(cls, signed: Tensor, mask: Tensor, since: int, shape: tuple[int, ...]) -> Ages:
        """Return the ages from signed numbers, see :meth:`signed`.

        Args:
            signed: The numbers.
            mask: The mask, which may be coarser.
            since: The updates of active entries since it was set, which are in the numbers.
            shape: Shape of the entries.
        """
        active = signed[signed > 0].to(WIDE)
        # Another process, whose entries kept their mask for longer, may have saved the number.
        since = min(since, int(active.min()) - 1) if active.numel() else since
        ages = torch.where(signed > 0, signed.to(WIDE) - since, -signed.to(WIDE)) - 1
        coarse = ages[tuple(slice(size) for size in mask.shape)]
        ages = coarse if torch.equal(coarse.expand_as(ages), ages) else ages
        return cls(shape, tuple(signed.shape), *_simplest(ages), 0).turned(mask)._at(since)

    # --- properties

    @functools.cached_property
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
        held = self.flags if self.index is None else self.index
        assert held is not None
        return held.device

    @property
    def one(self) -> int | None:
        """The age of all active entries; None if they differ."""
        return None if isinstance(self.before, Tensor) else self.before + self.since

    @property
    def oldest(self) -> int:
        """No entry's age is above this."""
        return self.most + self.since

    @functools.cached_property
    def slice_dims(self) -> int:
        """Leading dimensions that mask and ages tell apart: a slice is all of an entry's other dimensions."""
        if self.dims is not None:
            return self.dims
        coarse = self.before.shape if isinstance(self.before, Tensor) else ()
        return max([0, *(dim + 1 for own in (self.mask_shape, coarse) for dim, n in enumerate(own) if n > 1)])

    @functools.cached_property
    def slice_size(self) -> int:
        """Number of entries in a slice."""
        return prod(self.shape[self.slice_dims :])

    @property
    def mask(self) -> Tensor:
        """The mask (bool), which broadcasts to the shape."""
        if self.flags is not None:
            return self.flags
        spread = self._in_shape(self.mask_of_slices())
        return spread[tuple(slice(size) for size in self.mask_shape)]

    def mask_of_slices(self) -> Tensor:
        """Return a flag for each slice, with an index."""
        assert self.index is not None
        flags = torch.zeros(self._slices, dtype=torch.bool, device=self.index.device)
        return flags.index_fill_(0, self.index.long(), True)

    @property
    def _slices(self) -> int:
        return prod(self.shape[: self.slice_dims])

    def _in_shape(self, slices: Tensor) -> Tensor:
        """Return one value for each slice in the shape, 1 within a slice."""
        dims = self.slice_dims
        return slices.view(*self.shape[:dims], *(1,) * (len(self.shape) - dims))

    @property
    def bytes(self) -> int:
        """Memory of mask, ages and index."""
        held = (self.flags, self.index, self.before)
        return sum(each.nbytes for each in held if isinstance(each, Tensor))

    # --- ages

    def flips(self, other: Ages) -> Tensor:
        """Return the number of entries that are active in one and not in the other."""
        differ = self.mask != other.mask
        return differ.sum() * (self.entries // max(differ.numel(), 1))

    def dense(self) -> int | Tensor:
        """Return the ages of all entries, with every update counted in: a number where they have one."""
        if self.index is not None:
            ages = torch.zeros(self._slices, dtype=WIDE, device=self.index.device)
            ages[self.index.long()] = _as_tensor(self.before, ages).view(-1).int() + self.since
            return self._in_shape(ages)
        if not self.since or not self.active:
            return self.before
        counted = self.before + self.since
        if self.active == self.entries:
            return counted
        mask = self.mask
        return torch.where(mask, _as_tensor(counted, mask), _as_tensor(self.before, mask))

    def signed(self) -> Tensor:
        """Return ages with the mask in them: ``a + 1`` of an active entry, ``-(a + 1)`` of a frozen one."""
        mask = self.mask
        ages = _as_tensor(self.dense(), mask) + 1
        return torch.where(mask, ages, -ages).to(_dtype_for(self.oldest))

    def of_active_slices(self) -> Tensor:
        """Return ``a + 1`` for each slice in the index, or once for all."""
        assert self.index is not None
        ages = _as_tensor(self.before, self.index).view(-1) + self.since + 1
        return ages.to(_dtype_for(self.oldest))

    def counted(self) -> Ages:
        """Return the ages after one more update of the active entries."""
        return replace(self, since=self.since + 1)

    def _at(self, since: int) -> Ages:
        return replace(self, since=since)

    def restarted(self) -> Ages:
        """Return the same mask with every age 0."""
        return replace(self, before=0, most=0, since=0)

    def to(self, device: torch.device) -> Ages:
        """Return the ages on another device."""
        before = self.before.to(device) if isinstance(self.before, Tensor) else self.before
        flags, index = (each if each is None else each.to(device) for each in (self.flags, self.index))
        return replace(self, before=before, flags=flags, index=index)

    # --- masks

    def is_mask(self, mask: Tensor) -> bool:
        """Return True if this mask is set."""
        own = self.mask
        return torch.equal(own, mask) if own.shape == mask.shape else bool((own == mask).all())

    def turned(self, mask: Tensor, *, forget: bool = False) -> Ages:
        """Return the ages under another mask.

        Args:
            mask: Bool, of as many dimensions as the shape, to which it broadcasts.
            forget: True if frozen entries get age 0.
        """
        active = int(mask.count_nonzero()) * (self.entries // mask.numel()) if self.entries else 0
        if self.entries and not 0 < active < self.entries:
            mask = mask[(slice(1),) * mask.dim()]
        ages = self.dense()
        if forget and active < self.entries:
            ages = torch.where(mask, _as_tensor(ages, mask), 0) if active else 0
        # Not the caller's, who may write to it.
        flags = mask.clone(memory_format=torch.contiguous_format)
        return Ages(self.shape, tuple(mask.shape), *_simplest(ages), active, flags=flags)

    def packed(self) -> Ages:
        """Return the ages with those of active slices only."""
        index = self._positions(self.mask)
        index = index.int() if self.entries < 1 << 31 else index
        before, most = self.before, self.most
        if isinstance(before, Tensor):
            before, most = _simplest(self.taken(before.expand(self.shape), index)[:, :1])
        return replace(self, before=before, most=most, flags=None, index=index, dims=self.slice_dims)

    def _positions(self, mask: Tensor) -> Tensor:
        dims = self.slice_dims
        slices = mask.expand(*self.shape[:dims], *(1,) * (len(self.shape) - dims))
        return slices.reshape(-1).nonzero().view(-1)

    def active_slices(self) -> Tensor:
        """Return the positions of the active slices."""
        return self._positions(self.mask) if self.index is None else self.index

    # --- values of entries, all or of the active slices

    def taken(self, values: Tensor, index: Tensor) -> Tensor:
        """Return the values of some slices, a row each."""
        if values.is_contiguous():
            return values.view(-1, self.slice_size).index_select(0, index)
        places = torch.unravel_index(index.long(), self.shape[: self.slice_dims])
        return values[places].reshape(-1, self.slice_size)

    def put(self, values: Tensor, index: Tensor, rows: Tensor) -> None:
        """Write the values of some slices."""
        if values.is_contiguous():
            values.view(-1, self.slice_size).index_copy_(0, index.long(), rows)
        else:
            places = torch.unravel_index(index.long(), self.shape[: self.slice_dims])
            values[places] = rows.view(-1, *self.shape[self.slice_dims :])

    def spread(self, packed: Tensor, start: float) -> Tensor:
        """Return the values of the index as values of all entries, of which others get a start value."""
        assert self.index is not None
        values = packed.new_full(self.shape, start)
        self.put(values, self.index, packed.view(-1, self.slice_size))
        return values


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
    return NARROW if age < torch.iinfo(NARROW).max - 1 else WIDE
