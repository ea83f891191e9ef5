"""What changed of one tensor: entries, rows or the whole, with the base's values and the new ones."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The sides of a change: places in the first dimension of its values.
BASE, NEW = 0, 1
ENTRIES, ROWS, WHOLE = "entries", "rows", "whole"
# About what an index takes, to choose among the forms.
_INDEX_BYTES = 2
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Change:
    """What changed of one tensor.

    Args:
        shape: The tensor's shape.
        indices: Ascending (int64): of entries in the flattened tensor if values have two dimensions, else of
            rows; None: all of the tensor.
        values: The base's values and the new ones: shape (2, entries), (2, rows, ...) with the shape of a
            row, or (2, ...) with the tensor's shape.
    """

    shape: tuple[int, ...]
    indices: Tensor | None
    values: Tensor

    @property
    def form(self) -> str:
        """``"entries"``, ``"rows"`` or ``"whole"``."""
        if self.indices is None:
            return WHOLE
        return ENTRIES if self.values.dim() == 2 else ROWS

    @property
    def stored(self) -> int:
        """How many entries have values here."""
        return self.values[NEW].numel()

    def entries(self) -> Tensor:
        """The indices of the stored entries in the flattened tensor (int64, ascending)."""
        if self.indices is None:
            return torch.arange(self.stored)
        if self.form == ENTRIES:
            return self.indices
        row = math.prod(self.shape[1:])
        return (self.indices[:, None] * row + torch.arange(row)).flatten()

    def written_to(self, tensor: Tensor, side: int) -> Tensor:
        """Gives a copy of a tensor with the values of one side, bit for bit.

        Args:
            tensor: Of the same shape and dtype, on the CPU.
            side: `BASE` or `NEW`.
        """
        written = bits(tensor).clone()
        table, chosen, values = self._laid_out(written, side)
        table[chosen] = values
        return written.view(tensor.dtype).view(tensor.shape)

    def is_in(self, tensor: Tensor, side: int) -> bool:
        """Whether a tensor, as for :meth:`written_to`, holds the values of one side, bit for bit."""
        table, chosen, values = self._laid_out(bits(tensor), side)
        return torch.equal(table[chosen], values)

    def _laid_out(self, flat: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """A tensor's bits as a table with a line an index, which lines are meant, and their values."""
        lines = {WHOLE: 1, ENTRIES: len(flat), ROWS: self.shape[0] if self.shape else 1}[self.form]
        chosen = torch.zeros(1, dtype=torch.int64) if self.indices is None else self.indices
        table = flat.view(lines, len(flat) // lines)
        return table, chosen, bits(self.values[side]).view(len(chosen), table.shape[1])


def difference(base: Tensor, new: Tensor) -> Change | None:
    """Finds what changed, as bits: 0.0 and −0.0 differ, and NaN equals itself.

    Args:
        base: On the CPU.
        new: Of the same shape and dtype, on the CPU.

    Returns:
        The change in the form that takes least; None if there is none.
    """
    changed = bits(base) != bits(new)
    count = int(changed.count_nonzero())
    if not count:
        return None
    shape = tuple(base.shape)
    rows = changed.view(shape[0], -1).any(1) if base.dim() > 1 else changed
    row_count, row_size = int(rows.count_nonzero()), base.numel() // len(rows)
    pair = 2 * base.element_size()
    bytes_of = {
        WHOLE: pair * base.numel(),
        ROWS: (pair * row_size + _INDEX_BYTES) * row_count,
        ENTRIES: (pair + _INDEX_BYTES) * count,
    }
    form = min(bytes_of, key=lambda each: bytes_of[each])
    both = torch.stack([base, new])
    if form == WHOLE:
        return Change(shape, None, both)
    if form == ROWS and base.dim() > 1:
        chosen = rows.nonzero().flatten()
        return Change(shape, chosen, both[:, chosen])
    chosen = changed.nonzero().flatten()
    return Change(shape, chosen, both.view(2, -1)[:, chosen])


def of_entries(shape: tuple[int, ...], entries: Tensor, values: Tensor) -> Change:
    """Makes the change of some entries; rows, or a tensor, that they fill are stored as such.

    Args:
        shape: The tensor's shape.
        entries: Indices in the flattened tensor (int64, ascending).
        values: Shape (2, entries): the base's and the new ones.
    """
    if len(entries) == math.prod(shape):
        return Change(shape, None, values.view(2, *shape))
    row = math.prod(shape[1:])
    rows = torch.unique_consecutive(entries // row)
    if len(shape) > 1 and len(rows) * row == len(entries):
        return Change(shape, rows, values.view(2, len(rows), *shape[1:]))
    return Change(shape, entries, values)


def bits(tensor: Tensor) -> Tensor:
    """Reads a tensor's bits as integers of the same size (1-D)."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
