"""Exact selection of the highest scores, the same on every rank."""

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

ROUNDING = 1e-14
"""A product of a share and a count may miss a whole number by so large a part of it."""
# So many scores tell whether one value is common among all.
_SAMPLE = 1 << 12


def kept_count(density: float, count: int) -> int:
    """Return how many of ``count`` entries a density keeps: those at or above its percentile.

    ``k = n − ⌈(1 − p)(n − 1)⌉ = 1 + ⌊p (n − 1)⌋``, which is ``p · n`` where that is a whole number; 0 for
    density 0.
    """
    if density == 0.0 or count == 0:
        return 0
    return min(1 + math.floor(density * (count - 1) * (1.0 + ROUNDING)), count)


def highest(scores: Tensor, kept: int) -> Tensor:
    """Marks the ``kept`` highest scores; of equal ones those with the lowest index. NaN comes last.

    Args:
        scores: Any shape.
        kept: How many; cut to what there is.

    Returns:
        A bool tensor of the same shape with exactly ``min(kept, scores.numel())`` True.
    """
    return highest_together({"": scores}, kept)[""]


def highest_together(scores: Mapping[str, Tensor], kept: int) -> dict[str, Tensor]:
    """Marks the ``kept`` highest scores of all tensors taken together, as :func:`highest` does."""
    total = sum(tensor.numel() for tensor in scores.values())
    if kept <= 0 or kept >= total:
        return {name: torch.full_like(tensor, kept > 0, dtype=torch.bool) for name, tensor in scores.items()}
    parts = _comparable(scores)
    threshold = _smallest(parts, total - kept)
    chosen = [part >= threshold for part in parts]
    surplus = sum(int(torch.count_nonzero(marks)) for marks in chosen) - kept
    for part, marks in zip(reversed(parts), reversed(chosen), strict=True):
        if surplus <= 0:
            break
        ties = (part == threshold).nonzero().flatten()
        marks[ties[max(len(ties) - surplus, 0) :]] = False
        surplus -= len(ties)
    return {
        name: marks.reshape(tensor.shape).to(tensor.device)
        for marks, (name, tensor) in zip(chosen, scores.items(), strict=True)
    }


def _comparable(scores: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the scores as flat tensors of one dtype on one device, NaN as −∞."""
    device = next(iter(scores.values())).device
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in scores.values()))
    parts = [tensor.detach().flatten().to(device, dtype) for tensor in scores.values()]
    # A sum is NaN where an entry is, and is the cheapest pass over all of them.
    return [
        torch.where(part.isnan(), -math.inf, part) if bool(part.sum().isnan()) else part for part in parts
    ]


def _smallest(parts: list[Tensor], place: int) -> Tensor:
    """Return the value at a place of all scores sorted together, from 0."""
    left = torch.cat(parts)
    if left.device.type != "cpu" or left.dtype not in (torch.float32, torch.float64):
        return torch.kthvalue(left, place + 1).values
    # Numpy partitions many times as fast as torch, but not where one value is most of all there is.
    while (common := _common_value(left)) is not None:
        below, above = left < common, left > common
        less, more = int(torch.count_nonzero(below)), int(torch.count_nonzero(above))
        if less <= place < left.numel() - more:
            return common
        if place < less:
            left = left[below]
        else:
            place -= left.numel() - more
            left = left[above]
    left.numpy().partition(place)
    return left[place].clone()


def _common_value(scores: Tensor) -> Tensor | None:
    """Return a value that makes up more than an eighth of a sample; None where there is none."""
    sample = scores[:: max(scores.numel() // _SAMPLE, 1)]
    values, counts = sample.unique(return_counts=True)
    most = counts.argmax()
    return values[most] if int(counts[most]) * 8 > sample.numel() else None
