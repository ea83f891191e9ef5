"""Densities, and exact selection of the highest scores."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradpolicy.checks import check_call, check_share
from gradpolicy.errors import PolicyError, shown
from gradpolicy.schedules import Constant, Ramp
from gradpolicy.tensors.pattern import pattern_of

Density = Callable[[int], float]
"""A schedule of the density by the count of effective steps (or epochs, by the source's ``unit``)."""
DISTRIBUTIONS = ("uniform", "erk")
Scores = Callable[[], Tensor]
"""A function that computes the scores of a tensor."""
CHUNK = 1 << 16
"""The number of scores that are compared at a time, which stay in a core's cache."""
DIGIT = 16
"""The number of bits of a score that are found by a pass over all scores."""
ROUNDING = 1e-14
"""The relative rounding error of the product of a fraction and a count."""


def as_density(key: str, value: float | Density) -> Density:
    """Convert a number to a constant schedule, and check a schedule.

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


def density_of_level(kind: str, density: float | Density | None, level: str) -> Density:
    """Return the schedule of the density of a source, which N of M determines; the default is 0.1.

    Raises:
        PolicyError: As :func:`as_density`, or if density and level contradict each other.
    """
    pattern = pattern_of(level)
    share = None if pattern is None else pattern.share
    if share is not None and density not in (None, share):
        raise PolicyError(f"{kind}.density: level {level!r} means {share:g}, got {shown(density)}")
    return as_density(f"{kind}.density", (share or 0.1) if density is None else density)


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
        # One at a time, the densest first, since it changes the factor for the others.
        full.add(max(over, key=raw.__getitem__))
    return {name: 1.0 if name in full else factor * raw[name] for name in shapes}


def kept_count(density: float, count: int) -> int:
    """Return the number of ``count`` entries for a density: those at or above its percentile.

    ``k = n − ⌈(1 − p)(n − 1)⌉ = 1 + ⌊p (n − 1)⌋``, which is ``p · n`` where that is an integer; 0 for
    density 0.
    """
    if density == 0.0 or count == 0:
        return 0
    return min(1 + math.floor(density * (count - 1) * (1.0 + ROUNDING)), count)


# ---- selection


def highest(scores: Tensor, kept: int) -> Tensor:
    """Return the mask of the ``kept`` highest scores, and the first ones of equal scores. NaN is lowest.

    Args:
        scores: Any shape.
        kept: How many; cut to what there is.

    Returns:
        A bool tensor of the same shape with exactly ``min(kept, scores.numel())`` True.
    """
    flat = scores.detach().flatten()
    if kept <= 0 or kept >= flat.numel():
        return torch.full_like(scores, kept > 0, dtype=torch.bool)
    # The sum is NaN if any score is, and is the cheapest test.
    flat = torch.where(flat.isnan(), -math.inf, flat) if bool(flat.sum().isnan()) else flat
    threshold = _smallest(flat, flat.numel() - kept)
    marks = flat >= threshold
    surplus = int(torch.count_nonzero(marks)) - kept
    if surplus:
        ties = (flat == threshold).nonzero().flatten()
        marks[ties[len(ties) - surplus :]] = False
    return marks.reshape(scores.shape)


def marks_of_highest(
    scores: Mapping[str, Scores], kept: int, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """Return masks of the highest scores of all tensors together, with those of one in memory at a time.

    Args:
        scores: For each tensor a function that computes its scores.
        kept: The number of highest scores; at most that of all.
        dtype: The dtype of comparisons: float64 or, for all others, float32.

    Yields:
        Each name with the mask of its scores (1-D).
    """
    bits = 64 if dtype == torch.float64 else 32
    least, above = _least_key(scores, kept, bits)
    ties = kept - above
    for name, compute in scores.items():
        marks = []
        for keys in _keys(compute(), bits):
            chosen = keys >= least
            equal = (keys == least).nonzero().flatten()
            chosen[equal[max(ties, 0) :]] = False
            ties -= len(equal)
            marks.append(chosen)
        yield name, torch.cat(marks)


def _least_key(scores: Mapping[str, Scores], kept: int, bits: int) -> tuple[int, int]:
    """Return the key of the ``kept``-th highest score (the highest key for none), and the number above it.

    Each pass over the scores finds the next 16 bits of the key, from counts of keys with the same prefix.
    """
    found, above = 0, 0
    for shift in range(bits - DIGIT, -1, -DIGIT):
        first = shift == bits - DIGIT
        counts = torch.zeros(1 << DIGIT, dtype=torch.int64, device="cpu")
        for compute in scores.values():
            for keys in _keys(compute(), bits):
                if not first:
                    keys = keys[(keys >> (shift + DIGIT)) == found]
                # The highest digit includes the sign.
                digits = (keys >> shift) + (1 << (DIGIT - 1)) if first else (keys >> shift) & 0xFFFF
                counts += torch.bincount(digits, minlength=1 << DIGIT).cpu()
        # The number of scores with this digit or a higher one.
        reached = counts.flip(0).cumsum(0).flip(0)
        digit = int((reached >= kept - above).nonzero()[-1])
        above += int(reached[digit] - counts[digit])
        found = digit - (1 << (DIGIT - 1)) if first else (found << DIGIT) | digit
    return found, above


def _keys(scores: Tensor, bits: int) -> Iterator[Tensor]:
    """Yield integers in the order of the scores: their bits, inverted for negative scores."""
    floats, integers = (torch.float64, torch.int64) if bits == 64 else (torch.float32, torch.int32)
    for part in scores.flatten().split(CHUNK):
        # Negative zero becomes zero, and NaN the lowest score.
        part = torch.nan_to_num(part.to(floats), nan=-math.inf, posinf=math.inf, neginf=-math.inf) + 0.0
        keys = part.view(integers)
        yield keys ^ ((keys >> (bits - 1)) & ((1 << (bits - 1)) - 1))


def _smallest(scores: Tensor, index: int) -> Tensor:
    """Return the value at an index of the sorted flat scores."""
    if scores.device.type != "cpu" or scores.dtype not in (torch.float32, torch.float64):
        return torch.kthvalue(scores, index + 1).values
    # Twenty times as fast as torch if few scores are equal.
    scores = scores.clone()
    scores.numpy().partition(index)
    return scores[index].clone()
