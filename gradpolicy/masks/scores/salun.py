"""SalUn: saliency on a forget set, for machine unlearning."""

from torch import Tensor

from gradpolicy.masks.scores.score import Score


class SalUn(Score):
    """``|Σ ∇L|`` over the samples to forget, from its own batches and loss.

    Source: Fan et al. 2024, arXiv:2310.12508.
    """

    by_rows = True
    needs_batches = True

    def __call__(self, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores."""
        return gradient.abs()
