"""Time in which a mask source decides about 20 M entries, against a step of torch's fused AdamW."""

import itertools
from collections.abc import Callable

import torch

from benchmarks.measure import HERE, Row, device_seconds, paired_ratio
from benchmarks.optimizers import unmasked
from gradpolicy import masks
from gradpolicy.masks.gradient_source import GradientSource

TENSORS, SIDE = 5, 2000


def decision(source: GradientSource) -> Callable[[], object]:
    """One decision after the other, each by the same gradients."""
    parameters = {f"layers.{place}.weight": torch.randn(SIDE, SIDE, device=HERE) for place in range(TENSORS)}
    gradients = {name: torch.randn_like(weight) for name, weight in parameters.items()}
    source.setup(parameters, seed=0)
    steps = itertools.count(1)

    def decide() -> None:
        step = next(steps)
        if source.needs_gradients:
            source.observe(gradients)
        source.masks(step, 0)
        source.apply()

    return decide


def mask_choice() -> list[Row]:
    """Choosing anew, the window's gradients and writing the weights included."""
    baseline = unmasked()
    sources: dict[str, GradientSource] = {
        "TopK by Fisher information, of all together": masks.TopK(0.1, by="fisher", every=1),
        "TopK by Fisher information, each tensor": masks.TopK(0.1, by="fisher", within="tensor", every=1),
        "PruneAndGrow by gradient (RigL)": masks.PruneAndGrow(0.1, every=1, stop=1000),
        "PruneAndGrow at random (SET)": masks.PruneAndGrow(0.1, grow="random", every=1),
    }
    return [
        paired_ratio(name, decision(source), baseline, rounds=7, warmup=1, seconds=device_seconds)
        for name, source in sources.items()
    ]


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"mask_choice": mask_choice}
