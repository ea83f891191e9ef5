"""What learning rates of single tensors cost a step: a transformer of 293 M entries in 465 tensors."""

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import nn

import gradpolicy as gp
from benchmarks import measure
from benchmarks.measure import HERE, Row, Step
from gradpolicy.freezing import Freezer

RATES = [1 + place / 465 for place in range(465)]
"""As many different factors as there are tensors."""


def model(width: int = 768, layers: int = 38, vocabulary: int = 30_000) -> nn.ParameterList:
    """The tensors of a transformer, with gradients."""
    vector = (width,)
    attention = [vector, vector, (3 * width, width), (3 * width,), (width, width), vector]
    feedforward = [vector, vector, (4 * width, width), (4 * width,), (width, 4 * width), vector]
    ends = [(vocabulary, width), (512, width), *[vector] * 7]
    shapes = [*ends, *[*attention, *feedforward] * layers]
    made = nn.ParameterList(torch.randn(shape, device=HERE) for shape in shapes)
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def adamw(groups: Iterable[object]) -> torch.optim.Optimizer:
    """The optimizer of every row, in its fastest form."""
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)  # type: ignore[arg-type]


def by_policy(tensors: nn.ParameterList, alone: torch.optim.Optimizer, factors: list[float]) -> Step:
    """A whole step under a policy: it is asked what it sets, and the optimizer steps."""
    optimizer = gp.MaskedOptimizer(alone)
    rates = gp.Rates({str(place): factor for place, factor in enumerate(factors)})
    freezer = Freezer(tensors, [optimizer], {}, rates={"rates": rates})
    steps = itertools.count()

    def step() -> None:
        freezer.begin_step(next(steps))
        freezer.observe(optimizer)
        optimizer.step()

    return step


def by_hand(tensors: nn.ParameterList, alone: torch.optim.Optimizer, factors: list[float]) -> Step:
    """A step with a param group for each tensor."""
    each = zip(tensors.parameters(), factors, strict=True)
    groups = adamw([{"params": [parameter], "lr": 1e-3 * factor} for parameter, factor in each])
    groups.state = alone.state
    return groups.step


def rates() -> list[Row]:
    """Rates by a policy and by param groups made by hand, against one fused group.

    All step the same tensors and state: where in memory others happen to lie would count for more.
    """
    tensors = model()
    alone = adamw(tensors.parameters())
    alone.step()
    candidates = [
        ("465 rates, a policy", by_policy(tensors, alone, RATES), 1.05),
        ("465 rates, a param group each", by_hand(tensors, alone, RATES), None),
    ]
    with measure.one_thread():
        return [
            measure.paired_ratio(
                what, step, alone.step, target=target, rounds=31, seconds=measure.device_seconds
            )
            for what, step, target in candidates
        ]


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"rates": rates}
