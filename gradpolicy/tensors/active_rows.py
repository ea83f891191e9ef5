"""Some rows, columns or slices of a tensor, by their indices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class ActiveRows(NamedTuple):
    """Some slices of a tensor along one dimension.

    Attributes:
        positions: Their indices (int64, 1-D, ascending).
        dim: The dimension that they index: 0 for rows, 1 for columns.
    """

    positions: Tensor
    dim: int

    @classmethod
    def of_slices(cls, mask: Tensor, dims: Iterable[int]) -> ActiveRows | None:
        """Return the active slices along one of some dimensions; None for a mask that cuts such slices."""
        for dim in dims:
            flags = mask[tuple(slice(None) if each == dim else slice(1) for each in range(mask.dim()))]
            if torch.equal(flags.expand_as(mask), mask):
                return cls(flags.flatten().nonzero().flatten(), dim)
        return None

    def select(self, tensor: Tensor) -> Tensor:
        """Return these rows or columns of a tensor."""
        return tensor.index_select(self.dim, self.positions)
