"""Optimizers that update rows or columns as parameters of their own: Muon and Adafactor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

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


class SubmatrixRule(ABC):
    """Which rows or columns an optimizer can update as a parameter of their own, and what state is theirs.

    For optimizers that compute the update of an entry from others of its tensor. They are exact for a mask
    that leaves whole rows or columns active: these move as under the same optimizer run on them alone.

    Args:
        optimizer: The optimizer that the rule describes.

    Attributes:
        dims: The dimensions whose slices can train alone: 0 are rows, 1 columns.
        begins: True if `begin` has anything to do.
    """

    dims: tuple[int, ...] = (0,)
    begins = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @abstractmethod
    def names(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the state that belongs to the rows or columns; any other is the tensor's, and carries on."""

    def part(self, mask: Tensor, parameter: Tensor) -> ActiveRows | None:
        """Return the rows or columns that alone are active; None if the optimizer must step the whole tensor.

        Args:
            mask: Bool, of the parameter's dimensions, to which it broadcasts; some entries are active.
            parameter: The parameter.

        """
        return ActiveRows.of_slices(mask, self.dims)

    def begin(self, state: dict[str, Any], gradient: Tensor, young: Tensor) -> None:  # noqa: B027  (optional)
        """Set the state of rows before their first update, where it does not begin at 0.

        Args:
            state: The state of active rows, not empty.
            gradient: Their gradient.
            young: True for each row that has had no update (bool, 1-D).
        """


class Muon(SubmatrixRule):
    """`torch.optim.Muon` (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

    Newton-Schulz makes the momentum of the active rows or columns orthogonal; the rate follows their shape.
    """

    dims = (0, 1)

    def names(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the momentum."""
        return ("momentum_buffer",)


_AVERAGED = {"row_var": (-1,), "col_var": (-2,), "variance": ()}
"""The dimensions that each statistic averages squared gradients over."""


class Adafactor(SubmatrixRule):
    """`torch.optim.Adafactor` (Shazeer & Stern 2018, arXiv:1804.04235).

    The row statistics, the clipping of the update and its scale are those of the active rows alone. The step
    count and, of a matrix, the column statistics are the tensor's: they go on whichever rows are active. The
    statistics of a row that has none begin with its first squared gradient, as all do at its first step.
    """

    begins = True

    def names(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the row statistics; of more dimensions than two, both belong to the slice."""
        return {1: ("variance",), 2: ("row_var",)}.get(parameter.dim(), ("row_var", "col_var"))

    def begin(self, state: dict[str, Any], gradient: Tensor, young: Tensor) -> None:
        """Set the mean square of the gradient."""
        flags = young.view(-1, *(1,) * (gradient.dim() - 1))
        for name in self.names(gradient):
            squares = gradient.square()
            for dim in _AVERAGED[name]:
                squares = squares.mean(dim, keepdim=True)
            state[name] = squares.where(flags, state[name])
