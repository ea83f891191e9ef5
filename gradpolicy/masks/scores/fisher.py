"""Diagonal empirical Fisher information, by batch or by sample."""

from torch import Tensor

from gradpolicy.masks.scores.score import Score


class Fisher(Score):
    """``Σ g²`` of the gradients of batches: Child-Tuning_D.

    Source: Xu et al. 2021, arXiv:2109.05687.
    """

    by_rows = True

    def __call__(self, second_moment: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return second_moment


class FisherBySample(Fisher):
    """``Σ gᵢ²`` of the gradients of single samples from its own loader: the FISH mask.

    Source: Sung, Nair, Raffel 2021, arXiv:2111.09839.
    """

    by_sample = True
