"""What masked updates cost in time and memory, against torch's fused AdamW taken in turn with them."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import device, measure
from benchmarks.device import HERE
from gradpolicy import MaskedOptimizer

Row = dict[str, Any]
# One weight: 21 M parameters; on a GPU 336 M, where 21 M would be a matter of what Python takes.
CPU_ROWS, COLUMNS = 4096, 5120
CPU = torch.device("cpu")
ROWS = CPU_ROWS * (16 if device.memory() > 30e9 else 4 if device.memory() > 8e9 else 1)
ADAM_BYTES = 8
"""Adam's two moments, a float32 entry."""
STEP_BYTES = 28
"""What a step moves of a float32 entry: parameter and moments read and written, the gradient read."""
PIECE = 16 if HERE.type == "cpu" else 8
"""Float32 entries that memory gives at once: 64 bytes on a CPU, 32 on a GPU."""
ONE_AGE, MANY_AGES = (1.15, 1.35) if HERE.type == "cpu" else (1.10, 1.20)
"""The most that a masked step should be, in fused ones."""


def paired_ratio(
    what: str,
    candidate: Callable[[], object],
    baseline: Callable[[], object],
    *,
    target: float,
    moved: float | None = None,
) -> Row:
    """`measure.paired_ratio` on the device there is.

    Args:
        what: What is measured, in words.
        candidate: What is measured.
        baseline: What it is measured against.
        target: The most that the ratio should be.
        moved: Bytes that must be read or written, for the share of the copy bandwidth.
    """
    row = measure.paired_ratio(what, candidate, baseline, target=target, seconds=device.seconds)
    share = {} if moved is None else {"copy_share": device.copy_share(moved, row["milliseconds"])}
    return {**row, **share}


def weight(place: torch.device = HERE, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A large weight with a gradient."""
    rows = CPU_ROWS if place.type == "cpu" else ROWS
    made = nn.Parameter(torch.randn(rows, COLUMNS, device=place, dtype=dtype))
    made.grad = torch.randn_like(made)
    return made


def fused(place: torch.device = HERE, dtype: torch.dtype = torch.float32) -> Callable[[], object]:
    """A step of torch's fused AdamW, with its state made."""
    optimizer = torch.optim.AdamW([weight(place, dtype)], fused=True)
    optimizer.step()
    return optimizer.step


def masked(
    shape: tuple[int, int],
    density: float,
    changes: int = 1,
    dtype: torch.dtype = torch.float32,
    /,
    **options: str,
) -> MaskedOptimizer:
    """A wrapped AdamW whose mask has changed some times, a step after each."""
    parameter = weight(HERE, dtype)
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], fused=True), **options)
    optimizer.step()
    for _ in range(changes):
        optimizer.set_mask(parameter, torch.rand(shape, device=HERE) < density)
        optimizer.step()
    return optimizer


def moved(density: float) -> float:
    """Bytes that a step must move under random entry masks: pieces with an active entry, and codes."""
    reached = 1 - (1 - density) ** PIECE
    return (STEP_BYTES * reached + 1) * ROWS * COLUMNS


def masked_step() -> list[Row]:
    """Entry masks: any density, after few and many changes of the mask."""
    baseline, entries = fused(), (ROWS, COLUMNS)
    rows = [
        paired_ratio("torch's fused AdamW", baseline, baseline, target=1.0, moved=STEP_BYTES * ROWS * COLUMNS)
    ]
    for density in (0.01, 0.1, 0.5, 0.9):
        step = masked(entries, density, bias_correction="tensor").step
        name = f"tensor correction, {density:.0%} active"
        rows.append(paired_ratio(name, step, baseline, target=ONE_AGE, moved=moved(density)))
    for state in ("keep", "zero"):
        for changes in (4, 24, 60):
            step = masked(entries, 0.5, changes, frozen_state=state).step
            name = f"entry correction, {state}, 50% active, {changes} changes"
            rows.append(paired_ratio(name, step, baseline, target=MANY_AGES, moved=moved(0.5)))
    step = masked(entries, 0.1, 4, frozen_state="drop").step
    name = "entry correction, drop, 10% active, 4 changes"
    return [*rows, paired_ratio(name, step, baseline, target=MANY_AGES)]


def masked_bfloat16() -> list[Row]:
    """Entry masks of a bfloat16 weight, against torch's fused step on one."""
    baseline, entries, half = fused(HERE, torch.bfloat16), (ROWS, COLUMNS), torch.bfloat16
    tensor = masked(entries, 0.5, 1, half, bias_correction="tensor").step
    entry = masked(entries, 0.5, 24, half).step
    return [
        paired_ratio("tensor correction, 50% active", tensor, baseline, target=ONE_AGE),
        paired_ratio("entry correction, 50% active, 24 changes", entry, baseline, target=MANY_AGES),
    ]


def masked_rows() -> list[Row]:
    """Row and tensor masks cost what is active."""
    baseline = fused()
    rows = []
    for density in (0.01, 0.1, 0.5):
        for state in ("keep", "drop"):
            step = masked((ROWS, 1), density, 2, frozen_state=state).step
            name, moved = f"{density:.0%} of rows, {state}", density * STEP_BYTES * ROWS * COLUMNS
            rows.append(paired_ratio(name, step, baseline, target=density + 0.05, moved=moved))
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
    for state, density in product(("keep", "zero", "drop"), (0.1, 0.5, 0.9)):
        optimizer = masked((ROWS, COLUMNS), density, 4, frozen_state=state)
        parameter = optimizer.param_groups[0]["params"][0]
        masks = [torch.rand(ROWS, COLUMNS, device=HERE) < density for _ in range(2)]

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
    "masked_bfloat16": masked_bfloat16,
    "masked_rows": masked_rows,
    "drop_memory": drop_memory,
    "mask_change": mask_change,
}
