"""Scores that are one formula of sums over steps, weights and activations."""

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


class Gradient(Score):
    """``|Σ g|``."""

    by_rows = True

    def __call__(self, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return gradient.abs()


class SNIP(Score):
    """``|Σ w · g|``.

    Source: Lee, Ajanthan, Torr 2019, arXiv:1810.02340.
    """

    by_rows = True

    def __call__(self, product: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return product.abs()


class Movement(Score):
    """``−Σ w · g``.

    Source: Sanh, Wolf, Rush 2020, arXiv:2005.07683.
    """

    by_rows = True

    def __call__(self, product: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return -product


class Change(Score):
    """``|w − w₀|``.

    Source: Ansell et al. 2022, arXiv:2110.07560 (LT-SFT).
    """

    by_rows = True

    def __call__(self, weight: Tensor, initial: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return (weight - initial).abs()


class Fisher(Score):
    """``Σ g²`` of the gradients of batches: Child-Tuning_D.

    Source: Xu et al. 2021, arXiv:2109.05687.
    """

    by_rows = True

    def __call__(self, second_moment: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return second_moment


class Wanda(Score):
    """``|wᵢⱼ| · ‖xⱼ‖₂``; compared within each row in the paper (``within="row"``).

    Source: Sun et al. 2024, arXiv:2306.11695.
    """

    by_rows = True

    def __call__(self, weight: Tensor, activation_norm: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return weight.abs() * activation_norm
