"""Time of a training step with frozen layers, against ``requires_grad=False`` set by hand."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradpolicy as gp
from benchmarks.measure import Row, paired_ratio
from gradpolicy.freezing import Freezer

LAYERS, WIDTH, BATCH = 8, 1024, 256
FROZEN = range(LAYERS * 3 // 4)


def network() -> nn.Sequential:
    """Eight layers with ReLUs between them, 8.4 M parameters."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def by_hand(model: nn.Sequential, batch: torch.Tensor) -> Callable[[], object]:
    """A training step with the gradients of the first layers turned off."""
    for place in FROZEN:
        model[place].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_policy(model: nn.Sequential, batch: torch.Tensor, mask: Any) -> Callable[[], object]:
    """The same with a freeze policy on the first layers."""
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    policy = gp.Freeze(mask, params=[f"{place}.*" for place in FROZEN])
    freezer = Freezer(model, [optimizer], {"trunk": policy})
    steps = iter(range(1 << 30))

    def step() -> None:
        freezer.begin_step(next(steps))
        model(batch).square().mean().backward()
        freezer.observe(optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def backward() -> list[Row]:
    """The first three quarters frozen by tensor masks: fixed ones, and such as are drawn anew each step."""
    model, batch = network(), torch.randn(BATCH, WIDTH)
    baseline = by_hand(copy.deepcopy(model), batch)
    masks = {"fixed": gp.masks.Fixed(), "drawn anew each step": gp.masks.Random(1e-6, level="tensor")}
    return [
        paired_ratio(
            f"first 75% frozen, {name}",
            by_policy(copy.deepcopy(model), batch, mask),
            baseline,
            target=1.05,
            rounds=25,
        )
        for name, mask in masks.items()
    ]


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"backward": backward}
