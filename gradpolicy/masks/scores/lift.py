"""LIFT: the magnitude of weights after a low-rank approximation."""

import torch
from torch import Tensor

from gradpolicy.checks import check_whole
from gradpolicy.errors import PolicyError

ROWS = 256
"""The number of rows of a matrix that are converted at a time."""
LEAST_SHARE = 1e-2
"""The ratio of the ``r``-th to the largest eigenvalue below which double precision is used.

The eigenvalues are squares of singular values ``σ``, so that the error of the subspace is ``σ₁ / 2σᵣ`` times
that of a singular value decomposition: here at most 5 times.
"""


class LIFT:
    """``|U_r S_r V_rᵀ|``, the best approximation of rank ``r`` of a weight matrix.

    Args:
        rank: The rank ``r``; a matrix of a lower rank is unchanged.

    Source: Liu et al. 2025, arXiv:2506.00772.
    """

    def __init__(self, rank: int = 128) -> None:
        self.rank = check_whole("LIFT.rank", rank, least=1)

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the scores."""
        if weight.dim() < 2:
            raise PolicyError("LIFT: is of matrices; leave vectors such as biases out of params")
        return approximation(weight.flatten(1), self.rank).abs().reshape(weight.shape)

    def __repr__(self) -> str:
        return f"LIFT(rank={self.rank})"


def approximation(matrix: Tensor, rank: int) -> Tensor:
    """Return the best approximation of rank ``r``, ``W V_r V_rᴴ``.

    ``V_r`` are the eigenvectors of ``WᴴW`` with the largest eigenvalues, which need less time and memory
    than a singular value decomposition.

    Args:
        matrix: ``W``, in single or double precision.
        rank: The rank ``r``.
    """
    if rank >= min(matrix.shape):
        return matrix
    if matrix.shape[0] < matrix.shape[1]:
        return approximation(matrix.mH, rank).mH
    for dtype in dict.fromkeys((matrix.dtype, torch.promote_types(matrix.dtype, torch.float64))):
        values, vectors = torch.linalg.eigh(_gram(matrix, dtype))
        if values[-rank] > LEAST_SHARE * values[-1]:
            break
    basis = vectors[:, -rank:].to(matrix.dtype)
    return matrix @ basis @ basis.mH


def _gram(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``WᴴW`` in a dtype."""
    gram = matrix.new_zeros(matrix.shape[1], matrix.shape[1], dtype=dtype)
    for rows in matrix.split(ROWS):
        rows = rows.to(dtype)
        gram.addmm_(rows.mH, rows)
    return gram
