"""The absolute value of the summed gradient."""

from torch import Tensor

from gradpolicy.masks.scores.score import Score


class Gradient(Score):
    """``|Σ g|``."""

    by_rows = True

    def __call__(self, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return gradient.abs()
