"""The absolute change of a weight since the start of training."""

from torch import Tensor

from gradpolicy.masks.scores.score import Score


class Change(Score):
    """``|w − w₀|``.

    Source: Ansell et al. 2022, arXiv:2110.07560 (LT-SFT).
    """

    by_rows = True

    def __call__(self, weight: Tensor, initial: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return (weight - initial).abs()
