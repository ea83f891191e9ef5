"""The share of entries that train: over time, and shared out among tensors."""

import math
from collections.abc import Callable, Mapping, Sequence

from gradpolicy.checks import check_call, check_share
from gradpolicy.schedules import Constant, Ramp

Density = Callable[[int], float]
"""A schedule: the share at a count of effective steps (or epochs, as the source's ``unit`` says)."""
DISTRIBUTIONS = ("uniform", "erk")


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
