"""Movement: weights that move away from zero."""

from torch import Tensor

from gradpolicy.masks.scores.score import Score


class Movement(Score):
    """``−Σ w · g``.

    Source: Sanh, Wolf, Rush 2020, arXiv:2005.07683.
    """

    by_rows = True

    def __call__(self, product: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return -product
