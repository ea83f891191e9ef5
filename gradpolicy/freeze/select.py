"""Exact selection of the highest scores, the same on every rank."""

import functools
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
    """The scores as flat tensors of one dtype on one device, NaN as −∞."""
    device = next(iter(scores.values())).device
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in scores.values()))
    parts = [tensor.detach().flatten().to(device, dtype) for tensor in scores.values()]
    # A sum is NaN where an entry is, and is the cheapest pass over all of them.
    return [
        torch.where(part.isnan(), -math.inf, part) if bool(part.sum().isnan()) else part for part in parts
    ]


def _smallest(parts: list[Tensor], place: int) -> Tensor:
    """The value at a place of all scores sorted together, from 0."""
    together = torch.cat(parts)
    if together.device.type == "cpu" and together.dtype in (torch.float32, torch.float64):
        # In place, and many times as fast as torch's.
        together.numpy().partition(place)
        return together[place].clone()
    return torch.kthvalue(together, place + 1).values
