"""LIFT: the principal weights, those largest after a low-rank approximation."""

import torch
from torch import Tensor

from gradpolicy.checks import check_whole
from gradpolicy.errors import PolicyError
from gradpolicy.masks.scores.score import Score


class LIFT(Score):
    """``|U_r S_r V_rᵀ|``, the best approximation of rank ``r`` of a weight matrix.

    Args:
        rank: The rank ``r``; a matrix of a lower rank is taken as it is.

    Source: Liu et al. 2025, arXiv:2506.00772.
    """

    def __init__(self, rank: int = 128) -> None:
        super().__init__()
        self.rank = check_whole("LIFT.rank", rank, least=1)

    def __call__(self, weight: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        if weight.dim() < 2:
            raise PolicyError("LIFT: is of matrices; leave vectors such as biases out of params")
        left, values, right = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        best = (left[:, : self.rank] * values[: self.rank]) @ right[: self.rank]
        return best.abs().reshape(weight.shape)

    def __repr__(self) -> str:
        return f"LIFT(rank={self.rank})"
