"""Sparsity patterns for which hardware has kernels: N of every M entries, and blocks."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, shown


@dataclass(frozen=True)
class Pattern:
    """``"2:4"``: 2 of every 4 consecutive entries of a row; ``"16x32"``: blocks of 16 rows and 32 columns.

    A tensor is treated as the matrix ``(n, -1)``, as by :func:`torch.sparse.to_sparse_semi_structured`.

    Attributes:
        kept: The number of active entries of every ``columns`` of a row; None for blocks.
        rows: The height of a block; 1 for N of M.
        columns: The width of a block, or M.
    """

    kept: int | None
    rows: int
    columns: int

    @property
    def share(self) -> float | None:
        """The density if the pattern determines it, else None."""
        return None if self.kept is None else self.kept / self.columns

    @property
    def unit(self) -> int:
        """The number of entries that are active together."""
        return self.rows * self.columns if self.kept is None else 1

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that the pattern divides a tensor's shape.

        Raises:
            PolicyError: If it does not.
        """
        width = 0 if len(shape) < 2 else torch.Size(shape[1:]).numel()
        if len(shape) < 2 or shape[0] % self.rows or width % self.columns:
            raise PolicyError(
                f"level {self}: {shown(name)} of shape {tuple(shape)} is no matrix of {self.rows}·n rows and "
                f"{self.columns}·m columns; leave it out of params"
            )

    def pooled(self, scores: Tensor) -> Tensor:
        """Return the mean of each block, ``(n / rows, width / columns)``; for N of M the matrix itself."""
        matrix = scores.flatten(1)
        if self.kept is not None:
            return matrix
        return matrix.unflatten(1, (-1, self.columns)).unflatten(0, (-1, self.rows)).mean((1, 3))

    def blocks(self, mask: Tensor) -> Tensor:
        """Return one flag per block of a mask of blocks; for N of M the matrix itself."""
        return mask.flatten(1)[:: self.rows, :: 1 if self.kept is not None else self.columns]

    def spread(self, marks: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return flags of the shape of :meth:`pooled` as a mask of the tensor."""
        if self.kept is None:
            marks = marks.repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)
        return marks.reshape(shape)

    def best(self, scores: Tensor) -> Tensor:
        """Return True at the N highest of every M scores; of equal ones the first, NaN last.

        Args:
            scores: Floating-point, with a last dimension that M divides.
        """
        groups = torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        groups = groups.flatten().reshape(-1, self.columns)
        order = groups.argsort(dim=1, descending=True, stable=True)
        marks = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order[:, : self.kept], True)
        return marks.reshape(scores.shape)

    def holds(self, mask: Tensor) -> bool:
        """Return True if a mask follows the pattern: at most N of every M, or full blocks."""
        pooled = self.pooled(mask.float())
        if self.kept is None:
            return bool(((pooled == 0) | (pooled == 1)).all())
        return bool((pooled.reshape(-1, self.columns).sum(1) <= self.kept).all())

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}" if self.kept is None else f"{self.kept}:{self.columns}"


def pattern_of(level: object) -> Pattern | None:
    """Return the pattern of a level such as ``"2:4"`` or ``"16x16"``; None for other levels."""
    found = re.fullmatch(r"([1-9]\d{0,5})([:x])([1-9]\d{0,5})", level) if isinstance(level, str) else None
    if found is None:
        return None
    first, last = int(found[1]), int(found[3])
    if found[2] == "x":
        return Pattern(None, first, last)
    return Pattern(first, 1, last) if first < last else None
