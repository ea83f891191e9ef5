"""Scores by one formula.

The scores of a row depend on the inputs of this row alone.
"""

from torch import Tensor


def magnitude(weight: Tensor) -> Tensor:
    """Return ``|w|``.

    Source: Han et al. 2015, arXiv:1506.02626.
    """
    return weight.abs()


def gradient_magnitude(gradient: Tensor) -> Tensor:
    """Return ``|Σ g|``."""
    return gradient.abs()


def snip(product: Tensor) -> Tensor:
    """Return ``|Σ w · g|``.

    Source: Lee, Ajanthan, Torr 2019, arXiv:1810.02340.
    """
    return product.abs()


def movement(product: Tensor) -> Tensor:
    """Return ``−Σ w · g``.

    Source: Sanh, Wolf, Rush 2020, arXiv:2005.07683.
    """
    return -product


def change(weight: Tensor, initial: Tensor) -> Tensor:
    """Return ``|w − w₀|``.

    Source: Ansell et al. 2022, arXiv:2110.07560 (LT-SFT).
    """
    return (weight - initial).abs()


def fisher(second_moment: Tensor) -> Tensor:
    """Return ``Σ g²`` of the gradients of batches: Child-Tuning_D.

    Source: Xu et al. 2021, arXiv:2109.05687.
    """
    return second_moment


def wanda(weight: Tensor, activation_norm: Tensor) -> Tensor:
    """Return ``|wᵢⱼ| · ‖xⱼ‖₂``; compared within each row in the paper (``within="row"``).

    Source: Sun et al. 2024, arXiv:2306.11695.
    """
    return weight.abs() * activation_norm
