"""The change of one tensor: its changed lines, with old and new values."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError

# The sides of a change: indices of the first dimension of its values.
BASE, NEW = 0, 1
# The approximate size of an index in a file, for the choice of the width.
_INDEX_BYTES = 2
_GAP_DTYPES = (torch.uint8, torch.uint16)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class TensorChange:
    """The change of one tensor, in lines of equal width: single entries, rows, or the full tensor.

    Args:
        shape: The tensor's shape.
        lines: Indices of the lines that changed (int64, ascending).
        values: The base's values and the new ones, of shape (2, lines, width).
    """

    shape: tuple[int, ...]
    lines: Tensor
    values: Tensor

    @property
    def width(self) -> int:
        """The number of entries in a line."""
        return self.values.shape[2]

    @property
    def form(self) -> str:
        """``"entries"``, ``"rows"`` or ``"whole"``."""
        if self.width == math.prod(self.shape):
            return "whole"
        return "rows" if self.width > 1 else "entries"

    @property
    def stored(self) -> int:
        """The number of entries with stored values."""
        return self.values[NEW].numel()

    def entries(self) -> Tensor:
        """Return the indices of the stored entries in the flattened tensor (int64, ascending)."""
        return (
            self.lines[:, None] * self.width + torch.arange(self.width, device=self.lines.device)
        ).flatten()

    def written_to(self, tensor: Tensor, side: int) -> Tensor:
        """Return a copy of a tensor with the values of one side, bit for bit.

        Args:
            tensor: A tensor of the same shape and dtype, on the CPU.
            side: `BASE` or `NEW`.
        """
        written = bits(tensor).clone()
        written.view(-1, self.width)[self.lines] = self._bits(side)
        return written.view(tensor.dtype).view(tensor.shape)

    def is_in(self, tensor: Tensor, side: int) -> bool:
        """Return True if a tensor, as for :meth:`written_to`, has the values of one side, bit for bit."""
        return torch.equal(bits(tensor).view(-1, self.width)[self.lines], self._bits(side))

    def _bits(self, side: int) -> Tensor:
        return bits(self.values[side]).view(-1, self.width)


def widths_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the possible widths of lines of a tensor: the full tensor, a row, an entry."""
    return math.prod(shape), math.prod(shape[1:]), 1


def difference(base: Tensor, new: Tensor) -> TensorChange | None:
    """Return the change from one tensor to another, compared by bits: 0.0 ≠ −0.0, and NaN equals itself.

    Args:
        base: A tensor on the CPU.
        new: A tensor of the same shape and dtype, on the CPU.

    Returns:
        The change in lines of the smallest width in bytes; None if nothing changed.
    """
    changed = bits(base) != bits(new)
    if not changed.any():
        return None

    def file_bytes(width: int) -> int:
        lines = int(changed.view(-1, width).any(1).count_nonzero())
        return lines * (2 * base.element_size() * width + _INDEX_BYTES)

    shape = tuple(base.shape)
    width = min(widths_of(shape), key=file_bytes)
    lines = changed.view(-1, width).any(1).nonzero().flatten()
    return TensorChange(shape, lines, torch.stack([base, new]).view(2, -1, width)[:, lines])


def of_entries(shape: tuple[int, ...], entries: Tensor, values: Tensor) -> TensorChange:
    """Return the change of some entries, in the widest lines that they fill.

    Args:
        shape: The tensor's shape.
        entries: Indices in the flattened tensor (int64, ascending).
        values: The base's values and the new ones, of shape (2, entries).
    """
    lines = {width: torch.unique_consecutive(entries // width) for width in widths_of(shape)}
    width = next(width for width in lines if len(lines[width]) * width == len(entries))
    return TensorChange(shape, lines[width], values.view(2, -1, width))


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers of the same size (1-D)."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])


def encode(indices: Tensor) -> Tensor:
    """Encode ascending indices as gaps of one byte, or of two if that is smaller.

    The gap before index ``i_k`` is ``g = i_k − i_{k−1} − 1``, with ``i_{−1} = −1``. If ``m`` is the largest
    number of the type, the gap is written as ``g // m`` numbers ``m``, then ``g % m``. At a density of 1 % an
    index takes 1.1 bytes.

    Args:
        indices: Ascending indices from 0 on (int64, 1-D).

    Returns:
        The gaps, 1-D, uint8 or uint16.

    Example:
        >>> encode(torch.tensor([0, 3, 300])).tolist()
        [0, 2, 255, 41]
    """
    before = torch.cat([indices.new_tensor([-1]), indices[:-1]])
    gaps = indices - before - 1
    sizes = {kind: _gap_count(gaps, kind) * kind.itemsize for kind in _GAP_DTYPES}
    kind = min(_GAP_DTYPES, key=lambda each: sizes[each])
    most = torch.iinfo(kind).max
    written = gaps.new_full((_gap_count(gaps, kind),), most)
    written[(gaps // most + 1).cumsum(0) - 1] = gaps % most
    return written.to(kind)


def decode(gaps: Tensor, limit: int) -> Tensor:
    """Decode the indices that :func:`encode` wrote.

    Args:
        gaps: The gaps from a file, which may be untrusted.
        limit: The upper limit of indices, which is excluded.

    Returns:
        Distinct ascending indices (int64).

    Raises:
        PolicyError: If the gaps are invalid, or an index is out of range.

    Example:
        >>> decode(torch.tensor([0, 2, 255, 41], dtype=torch.uint8), limit=301).tolist()
        [0, 3, 300]
    """
    if gaps.dtype not in _GAP_DTYPES or gaps.dim() != 1:
        raise PolicyError(f"gaps must be 1-D, of 8 or 16 bits, got {gaps.dtype} of {gaps.dim()} dimensions")
    steps = gaps.to(torch.int64)
    ends = steps != torch.iinfo(gaps.dtype).max
    if len(ends) and not bool(ends[-1]):
        raise PolicyError("the last gap has no end")
    indices = (steps + ends).cumsum(0)[ends] - 1
    if len(indices) and int(indices[-1]) >= limit:
        raise PolicyError(f"index {int(indices[-1])} is out of range, there are {limit}")
    return indices


def _gap_count(gaps: Tensor, kind: torch.dtype) -> int:
    return int((gaps // torch.iinfo(kind).max + 1).sum())
