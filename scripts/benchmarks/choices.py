"""Time and memory in which a mask source decides about 20 M entries."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

import gradpolicy as gp
from benchmarks.measure import HERE, Row, device_seconds, paired_ratio
from benchmarks.optimizers import apart, peak_bytes, unmasked
from gradpolicy import masks
from gradpolicy.masks.gradient_source import GradientSource

TENSORS, SIDE = 5, 2000


def decision(source: GradientSource) -> Callable[[], object]:
    """One decision after the other, each by the same gradients."""
    parameters, gradients = tensors(TENSORS, SIDE)
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
    """One choice, including the gradients of its window and writing the weights."""
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


def training_memory() -> list[Row]:
    """The peak of a training of three steps under TopK, relative to that of full training."""
    full = apart(_peak_of_training, None)
    return [
        {
            "what": f"TopK, {before=}, {window=}, 10% of entries: peak of a training, of full training's",
            "ratio": apart(_peak_of_training, {"before": before, "window": window}) / full,
            "target": 1.0,
            "unit": "bytes",
        }
        for before, window in (("train", 1), ("train", 2), ("freeze", 1))
    ]


def _peak_of_training(options: dict[str, Any] | None) -> int:
    peak = 0
    for side in (32, 1024):  # The first loads what a training runs.
        peak = peak_bytes(functools.partial(_train, side, options))
    return peak


def _train(side: int, options: dict[str, Any] | None) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(side, side, bias=False) for _ in range(20)]).to(HERE)
    policies = [] if options is None else [gp.Freeze(masks.TopK(0.1, **options), frozen_state="drop")]
    with gp.training(model, torch.optim.AdamW(model.parameters(), fused=True), policies) as optimizer:
        for _ in range(3):
            model(torch.ones(8, side, device=HERE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def tensors(count: int, side: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters, and a gradient for each."""
    parameters = {f"layers.{place}.weight": torch.randn(side, side, device=HERE) for place in range(count)}
    return parameters, {name: torch.randn_like(weight) for name, weight in parameters.items()}


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "mask_choice": mask_choice,
    "training_memory": training_memory,
}
