"""Exact selection of the highest scores, the same on every rank."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def kept_of(density: float, count: int) -> int:
    """How many of ``count`` entries a density keeps: those at or above its percentile.

    ``k = n − ⌈(1 − p)(n − 1)⌉``, which is ``p · n`` where that is a whole number; 0 for density 0.
    """
    if density == 0.0 or count == 0:
        return 0
    # The product may miss a whole number by rounding.
    return count - math.ceil(round((1.0 - density) * (count - 1), 6))


def highest(scores: Tensor, kept: int) -> Tensor:
    """Marks the ``kept`` highest scores; of equal ones those with the lowest index. NaN comes last.

    Args:
        scores: Any shape.
        kept: How many; cut to what there is.

    Returns:
        A bool tensor of the same shape with exactly ``min(kept, scores.numel())`` True.
    """
    flat = torch.nan_to_num(scores.flatten(), nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if kept <= 0 or kept >= flat.numel():
        return torch.full_like(scores, kept > 0, dtype=torch.bool)
    threshold = torch.kthvalue(flat, flat.numel() - kept + 1).values
    chosen = flat > threshold
    ties = flat == threshold
    missing = kept - int(chosen.sum())
    chosen |= ties & (ties.cumsum(0) <= missing)
    return chosen.reshape(scores.shape)


def highest_together(scores: Mapping[str, Tensor], kept: int) -> dict[str, Tensor]:
    """Marks the ``kept`` highest scores of all tensors taken together, as :func:`highest` does."""
    device = next(iter(scores.values())).device
    together = torch.cat([tensor.flatten().to(device) for tensor in scores.values()])
    parts = highest(together, kept).split([tensor.numel() for tensor in scores.values()])
    return {
        name: part.reshape(tensor.shape).to(tensor.device)
        for part, (name, tensor) in zip(parts, scores.items(), strict=True)
    }
