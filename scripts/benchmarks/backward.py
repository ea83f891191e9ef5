"""Time of a training step with frozen layers, against ``requires_grad=False`` set by hand."""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import gradpolicy as gp
from benchmarks.measure import Row, paired_ratio
from gradpolicy.freezing import Freezer

LAYERS, WIDTH, BATCH = 8, 1024, 256
FROZEN = range(LAYERS * 3 // 4)
TRUNK = tuple(f"{place}.*" for place in FROZEN)


def network() -> nn.Sequential:
    """Eight layers with ReLUs between them, 8.4 M parameters."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def by_hand(
    model: nn.Sequential, batch: torch.Tensor, frozen: Iterable[int] = FROZEN
) -> Callable[[], object]:
    """A training step with the gradients of the first layers turned off."""
    for place in frozen:
        model[place].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_policy(
    model: nn.Sequential,
    batch: torch.Tensor,
    mask: Any,
    params: str | Iterable[str] = TRUNK,
    **options: Any,
) -> Callable[[], object]:
    """The same with a freeze policy on the first layers."""
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    policy = gp.Freeze(mask, params=params, **options)
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


class Encoder(nn.Sequential):
    """Six transformer layers of width 256 between two linear ones, 5 M parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = (nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(6))
        super().__init__(nn.Linear(64, 256), nn.Sequential(*layers), nn.Linear(256, 64))


def compiled_phases() -> list[Row]:
    """Eight layers in turn, another one each step, against full training: as it is, and compiled."""
    batch = torch.randn(8, 64, 64)
    rows: list[Row] = []
    for what in ("eager", "torch.compile"):
        models: list[Any] = [Encoder(), Encoder()]
        if what == "torch.compile":
            models = [torch.compile(model, fullgraph=True) for model in models]
        turns = by_policy(models[0], batch, gp.masks.BlockCyclic(every=1), "*", frozen_state="drop")
        full = by_hand(models[1], batch, ())
        # A time is that of a whole cycle; the first ones compile.
        cycles = [functools.partial(_repeat, step, 8) for step in (turns, full)]
        rows.append(paired_ratio(f"layers of 256 x 6 in turn, {what}", *cycles, rounds=15))
    # Nine tenths of what is saved without compiling.
    rows[1]["target"] = 1.0 - 0.9 * (1.0 - rows[0]["ratio"])
    return rows


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"backward": backward, "compiled_phases": compiled_phases}
