"""Exact selection of the highest scores, the same on every rank."""

import math
from collections.abc import Mapping

import numpy as np
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
    flat = scores.flatten()
    if flat.isnan().any():
        flat = torch.nan_to_num(flat, nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if kept <= 0 or kept >= flat.numel():
        return torch.full_like(scores, kept > 0, dtype=torch.bool)
    threshold = _smallest(flat, flat.numel() - kept)
    chosen = flat >= threshold
    surplus = int(chosen.sum()) - kept
    if surplus:
        ties = (flat == threshold).nonzero().flatten()
        chosen[ties[len(ties) - surplus :]] = False
    return chosen.reshape(scores.shape)


def _smallest(flat: Tensor, place: int) -> Tensor:
    """The value at a place of the sorted scores, from 0."""
    if flat.device.type == "cpu" and flat.dtype in (torch.float32, torch.float64):
        # Three times as fast as torch's.
        return torch.tensor(np.partition(flat.numpy(), place)[place])
    return torch.kthvalue(flat, place + 1).values


def highest_together(scores: Mapping[str, Tensor], kept: int) -> dict[str, Tensor]:
    """Marks the ``kept`` highest scores of all tensors taken together, as :func:`highest` does."""
    device = next(iter(scores.values())).device
    together = torch.cat([tensor.flatten().to(device) for tensor in scores.values()])
    parts = highest(together, kept).split([tensor.numel() for tensor in scores.values()])
    return {
        name: part.reshape(tensor.shape).to(tensor.device)
        for part, (name, tensor) in zip(parts, scores.items(), strict=True)
    }
