"""Wanda: the magnitude of weights times the norm of their input activations."""

from torch import Tensor

from gradpolicy.masks.scores.score import Score


class Wanda(Score):
    """``|wᵢⱼ| · ‖xⱼ‖₂``; compared within each row in the paper (``within="row"``).

    Source: Sun et al. 2024, arXiv:2306.11695.
    """

    by_rows = True

    def __call__(self, weight: Tensor, activation_norm: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return weight.abs() * activation_norm
