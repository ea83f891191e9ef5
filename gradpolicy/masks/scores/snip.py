"""SNIP: the first-order change of the loss if a weight is removed."""

from torch import Tensor

from gradpolicy.masks.scores.score import Score


class SNIP(Score):
    """``|Σ w · g|``.

    Source: Lee, Ajanthan, Torr 2019, arXiv:1810.02340.
    """

    by_rows = True

    def __call__(self, product: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return product.abs()
