"""Magnitude: the absolute value of the weight."""

from torch import Tensor

from gradpolicy.masks.scores.score import Score


class Magnitude(Score):
    """``|w|``.

    Source: Han et al. 2015, arXiv:1506.02626.
    """

    by_rows = True

    def __call__(self, weight: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return weight.abs()
