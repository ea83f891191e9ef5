"""How many entries are chosen, and which: densities, and exact selection by score."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradpolicy.checks import check_call, check_share
from gradpolicy.schedules import Constant, Ramp

Density = Callable[[int], float]
"""A schedule: the share at a count of effective steps (or epochs, as the source's ``unit`` says)."""
DISTRIBUTIONS = ("uniform", "erk")
ROUNDING = 1e-14
"""By so large a part of it the product of a share and a count may miss a whole number."""


def as_density(key: str, value: float | Density) -> Density:
    """Return a schedule; a number becomes a constant one.

    Args:
        key: The argument that an error names.
        value: A function of the count, or a share.

    Raises:
        PolicyError: If it is neither a share between 0 and 1 nor a function of the count, or a ready-made
            schedule leaves the shares.
    """
    if not callable(value):
        return Constant(check_share(key, value))
    check_call(key, value, 0, takes="the count alone")
    if isinstance(value, Constant | Ramp):
        for name in {"value", "start", "stop"} & vars(value).keys():
            check_share(f"{key}: {type(value).__name__}.{name}", vars(value)[name])
    return value


def density_at(density: Density, count: int) -> float:
    """Return the density at a count.

    Raises:
        PolicyError: If a schedule of the user's gives a value outside [0, 1].
    """
    return check_share(f"density at {count}", density(count))


def densities(shapes: Mapping[str, Sequence[int]], density: float, distribution: str) -> dict[str, float]:
    """Return the density of each tensor.

    Args:
        shapes: The tensors' shapes by name.
        density: The density of all of them together.
        distribution: ``"uniform"``: the same for all. ``"erk"``: proportional to
            ``Σ shape / Π shape`` (Erdős–Rényi–kernel), with no tensor above 1.

    Source: Evci et al. 2020, arXiv:1911.11134, section 3 and appendix; Mocanu et al. 2018 for layers without
    kernels.
    """
    if distribution == "uniform":
        return dict.fromkeys(shapes, density)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    wanted = density * sum(sizes.values())
    full: set[str] = set()
    while len(full) < len(shapes):
        left = wanted - sum(sizes[name] for name in full)
        factor = left / sum(raw[name] * sizes[name] for name in shapes if name not in full)
        over = {name for name in shapes if name not in full and factor * raw[name] > 1.0}
        if not over:
            break
        # One at a time, the densest: filling it changes the factor for the others.
        full.add(max(over, key=raw.__getitem__))
    return {name: 1.0 if name in full else factor * raw[name] for name in shapes}


def kept_count(density: float, count: int) -> int:
    """Return how many of ``count`` entries a density keeps: those at or above its percentile.

    ``k = n − ⌈(1 − p)(n − 1)⌉ = 1 + ⌊p (n − 1)⌋``, which is ``p · n`` where that is a whole number; 0 for
    density 0.
    """
    if density == 0.0 or count == 0:
        return 0
    return min(1 + math.floor(density * (count - 1) * (1.0 + ROUNDING)), count)


# ---- which entries


def highest(scores: Tensor, kept: int) -> Tensor:
    """Mark the ``kept`` highest scores; of equal ones those with the lowest index. NaN comes last.

    Args:
        scores: Any shape.
        kept: How many; cut to what there is.

    Returns:
        A bool tensor of the same shape with exactly ``min(kept, scores.numel())`` True.
    """
    return highest_together({"": scores}, kept)[""]


def highest_together(scores: Mapping[str, Tensor], kept: int) -> dict[str, Tensor]:
    """Mark the ``kept`` highest scores of all tensors taken together, as :func:`highest` does."""
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
    scores = torch.cat(parts)
    if scores.device.type != "cpu" or scores.dtype not in (torch.float32, torch.float64):
        return torch.kthvalue(scores, place + 1).values
    # Twenty times as fast as torch where few scores are equal.
    scores.numpy().partition(place)
    return scores[place].clone()
