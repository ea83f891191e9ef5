"""What masked updates cost in time and memory, against torch's fused AdamW taken in turn with them."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import paired_ratio
from gradpolicy import MaskedOptimizer

Row = dict[str, Any]
ROWS, COLUMNS = 4096, 5120  # 21 M parameters, as one weight
ADAM_BYTES = 8
"""Adam's two moments, a float32 entry."""


def weight() -> nn.Parameter:
    """A large weight with a gradient."""
    made = nn.Parameter(torch.randn(ROWS, COLUMNS))
    made.grad = torch.randn_like(made)
    return made


def fused() -> Callable[[], object]:
    """A step of torch's fused AdamW, with its state made."""
    optimizer = torch.optim.AdamW([weight()], fused=True)
    optimizer.step()
    return optimizer.step


def masked(shape: tuple[int, int], density: float, changes: int = 1, **options: str) -> MaskedOptimizer:
    """A wrapped AdamW whose mask has changed some times, a step after each."""
    parameter = weight()
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], fused=True), **options)
    optimizer.step()
    for _ in range(changes):
        optimizer.set_mask(parameter, torch.rand(shape) < density)
        optimizer.step()
    return optimizer


def masked_step() -> list[Row]:
    """Entry masks: any density, after few and many changes of the mask."""
    baseline, entries = fused(), (ROWS, COLUMNS)
    rows = []
    for density in (0.01, 0.1, 0.5, 0.9):
        step = masked(entries, density, bias_correction="tensor").step
        rows.append(paired_ratio(f"tensor correction, {density:.0%} active", step, baseline, target=1.15))
    for state in ("keep", "zero"):
        for changes in (4, 24, 60):
            step = masked(entries, 0.5, changes, frozen_state=state).step
            name = f"entry correction, {state}, 50% active, {changes} changes"
            rows.append(paired_ratio(name, step, baseline, target=1.35))
    step = masked(entries, 0.1, 4, frozen_state="drop").step
    return [*rows, paired_ratio("entry correction, drop, 10% active, 4 changes", step, baseline, target=1.35)]


def masked_rows() -> list[Row]:
    """Row and tensor masks cost what is active."""
    baseline = fused()
    rows = []
    for density in (0.01, 0.1, 0.5):
        for state in ("keep", "drop"):
            step = masked((ROWS, 1), density, 2, frozen_state=state).step
            rows.append(
                paired_ratio(f"{density:.0%} of rows, {state}", step, baseline, target=density + 0.05)
            )
    frozen = masked((1, 1), 0.0).step
    return [*rows, paired_ratio("wholly frozen", frozen, baseline, target=0.05)]


def drop_memory() -> list[Row]:
    """Bytes held for the optimizer's state at 10 % active, against Adam's."""
    rows: list[Row] = []
    for name, shape, target in (("entries", (ROWS, COLUMNS), 0.16), ("rows", (ROWS, 1), 0.11)):
        held = masked(shape, 0.1, 4, frozen_state="drop").state_bytes()
        ratio = held / (ADAM_BYTES * ROWS * COLUMNS)
        rows.append({"what": f"drop, 10% of {name}", "ratio": ratio, "target": target, "unit": "bytes"})
    tensors = [nn.Parameter(torch.ones(1000)) for _ in range(10)]
    optimizer = MaskedOptimizer(torch.optim.AdamW(tensors), frozen_state="drop")
    for index, tensor in enumerate(tensors):
        optimizer.set_mask(tensor, torch.tensor(index == 0))
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    ratio = optimizer.state_bytes() / (ADAM_BYTES * 10_000)
    return [
        *rows,
        {"what": "drop, 1 tensor of 10", "ratio": ratio, "target": 0.11, "unit": "bytes"},
    ]


def mask_change() -> list[Row]:
    """Setting new masks on all entries, against one fused step."""
    baseline, rows = fused(), []
    for state, density in product(("keep", "zero", "drop"), (0.1, 0.5)):
        optimizer = masked((ROWS, COLUMNS), density, 4, frozen_state=state)
        parameter = optimizer.param_groups[0]["params"][0]
        masks = [torch.rand(ROWS, COLUMNS) < density for _ in range(2)]

        def change(
            masks: list[Tensor] = masks, optimizer: MaskedOptimizer = optimizer, own: Tensor = parameter
        ) -> None:
            masks.reverse()
            optimizer.set_masks({own: masks[0]})

        name = f"new entry masks, {state}, {density:.0%} active"
        rows.append(paired_ratio(name, change, baseline, target=1.0))
    return rows


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "masked_step": masked_step,
    "masked_rows": masked_rows,
    "drop_memory": drop_memory,
    "mask_change": mask_change,
}
