"""What masks cost where a model has many tensors, most of them small, against torch's fused AdamW."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.device import HERE, seconds
from benchmarks.measure import paired_ratio
from gradpolicy import MaskedOptimizer

Row = dict[str, Any]
Shapes = Sequence[tuple[int, ...]]
SMALL = [(64,)] * 200


def transformer(width: int = 384, layers: int = 12, vocabulary: int = 256, context: int = 256) -> Shapes:
    """The parameters of a transformer: by default 21.5 M in 148 tensors."""
    vector, square = (width,), (width, width)
    wide = [(3 * width, width), (3 * width,), square, vector]
    feedforward = [(4 * width, width), (4 * width,), (width, 4 * width), vector]
    layer = [vector, vector, *wide, vector, vector, *feedforward]
    return [(vocabulary, width), (context, width), *layer * layers, vector, vector]


def parameters(shapes: Shapes) -> list[nn.Parameter]:
    """Parameters with gradients."""
    made = [nn.Parameter(torch.randn(shape, device=HERE)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def fused(shapes: Shapes) -> torch.optim.Optimizer:
    """Torch's fused AdamW, with its state made."""
    optimizer = torch.optim.AdamW(parameters(shapes), fused=True)
    optimizer.step()
    return optimizer


def random_masks(optimizer: torch.optim.Optimizer, density: float) -> dict[Tensor, Tensor]:
    """A mask of entries for each parameter."""
    members = optimizer.param_groups[0]["params"]
    return {parameter: torch.rand_like(parameter) < density for parameter in members}


def masked(shapes: Shapes, density: float = 0.5, **options: str) -> MaskedOptimizer:
    """A wrapped AdamW with a mask of entries on every tensor, which has changed four times."""
    optimizer = MaskedOptimizer(fused(shapes), **options)
    for _ in range(4):
        optimizer.set_masks(random_masks(optimizer, density))
        optimizer.step()
    return optimizer


def _changing(shapes: Shapes, density: float, frozen_state: str) -> Callable[[], object]:
    optimizer = masked(shapes, density, frozen_state=frozen_state)
    masks = [random_masks(optimizer, density) for _ in range(2)]

    def change() -> None:
        masks.reverse()
        optimizer.set_masks(masks[0])

    return change


def masked_tensors() -> list[Row]:
    """A step, new masks, masked gradients and no masks at all, for many tensors."""
    rows: list[Row] = []
    for name, shapes, one_age, many_ages in (
        ("200 tensors of 64", SMALL, 1.5, 1.5),
        ("transformer, 21 M in 148 tensors", transformer(), 1.15, 1.35),
    ):
        baseline = fused(shapes).step
        at_most_one = None if shapes is SMALL else 1.0
        tried: list[tuple[str, Callable[[], object], float | None]] = [
            ("tensor correction", masked(shapes, bias_correction="tensor").step, one_age),
            ("entry correction", masked(shapes).step, many_ages),
            ("entry correction, drop, 10% active", masked(shapes, 0.1, frozen_state="drop").step, many_ages),
            ("wrapped, no masks", MaskedOptimizer(fused(shapes)).step, 1.1),
            ("mask_gradients()", masked(shapes).mask_gradients, None),
            ("new entry masks, keep", _changing(shapes, 0.5, "keep"), at_most_one),
            ("new entry masks, zero", _changing(shapes, 0.5, "zero"), at_most_one),
            ("new entry masks, drop, 10% active", _changing(shapes, 0.1, "drop"), at_most_one),
            ("new entry masks, drop, 50% active", _changing(shapes, 0.5, "drop"), at_most_one),
        ]
        for what, candidate, target in tried:
            row = paired_ratio(f"{name}: {what}", candidate, baseline, target=target, seconds=seconds)
            rows.append(row)
    return rows


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"masked_tensors": masked_tensors}
