"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235).

The row statistics, the clipping of the update and its scale are those of the active rows alone. The step
count and, of a matrix, the column statistics are the tensor's: they go on whichever rows are active. The
statistics of a row that has none begin with its first squared gradient, as all do at Adafactor's first step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradpolicy.optim.update_rules.base import SubmatrixRule

_AVERAGED = {"row_var": (-1,), "col_var": (-2,), "variance": ()}
"""The dimensions that each statistic averages squared gradients over."""


class Adafactor(SubmatrixRule):
    """`torch.optim.Adafactor`."""

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
