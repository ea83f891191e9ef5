"""How the density of a whole is shared out among tensors: uniform, or Erdős–Rényi–kernel."""

import math
from collections.abc import Mapping, Sequence

DISTRIBUTIONS = ("uniform", "erk")


def densities(shapes: Mapping[str, Sequence[int]], density: float, distribution: str) -> dict[str, float]:
    """The density of each tensor.

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
