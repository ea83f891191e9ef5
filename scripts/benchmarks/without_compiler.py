"""What masks cost where there is no C compiler, against torch's fused AdamW taken in turn with them."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice, product
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import paired_ratio
from benchmarks.optimizer import COLUMNS, CPU, fused, weight
from benchmarks.optimizer import CPU_ROWS as ROWS
from gradpolicy import MaskedOptimizer
from gradpolicy.machinery.compiling import SWITCH
from gradpolicy.optim.native import moves as native
from gradpolicy.tensors import hashing

Row = dict[str, Any]
ENTRIES = (ROWS, COLUMNS)


@contextmanager
def no_compiler() -> Iterator[None]:
    """As on a machine without a C compiler, within."""
    caches = (native.library, hashing._library)
    before = os.environ.get(SWITCH)
    try:
        os.environ[SWITCH] = "0"
        for cache in caches:
            cache.cache_clear()
        yield
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before
        for cache in caches:
            cache.cache_clear()


def masked(
    masks: Iterable[Tensor], changes: int, **options: Any
) -> tuple[MaskedOptimizer, Callable[[], None]]:
    """A wrapped AdamW whose masks have changed, a step after each, and what changes them once more."""
    parameter, masks = weight(CPU), iter(masks)
    inner = torch.optim.AdamW([parameter], amsgrad=options.pop("amsgrad", False))
    optimizer = MaskedOptimizer(inner, **options)
    for mask in islice(masks, changes):
        optimizer.set_mask(parameter, mask)
        optimizer.step()
    return optimizer, lambda: optimizer.set_mask(parameter, next(masks))


def random_masks(density: float, shape: tuple[int, int] = ENTRIES) -> Iterator[Tensor]:
    """A few masks in turn: drawing new ones would take longer than all else here."""
    return cycle([torch.rand(shape) < density for _ in range(3)])


def growing_masks(changes: int) -> Iterator[Tensor]:
    """Masks of which each adds some entries: every one makes a cohort of its own."""
    scores = torch.rand(ENTRIES)
    return (scores < (change + 1) / changes for change in range(changes))


def masked_step_without_compiler() -> list[Row]:
    """A step with entry masks, by the correction, the density and the changes so far; then rows."""
    baseline, rows = fused(CPU), []

    def measure(
        what: str, masks: Iterable[Tensor], changes: int, target: float = 3.0, **options: Any
    ) -> None:
        step = masked(masks, changes, **options)[0].step
        rows.append(paired_ratio(what, step, baseline, target=target))

    with no_compiler():
        for density in (0.01, 0.1, 0.5, 0.9):
            what = f"tensor correction, {density:.0%} active"
            measure(what, random_masks(density), 1, bias_correction="tensor")
        for state, changes in (("keep", 1), ("keep", 60), ("zero", 60)):
            what = f"entry correction, {state}, 50% active, {changes} changes"
            measure(what, random_masks(0.5), changes, frozen_state=state)
        measure("entry correction, keep, 140 cohorts", growing_masks(140), 139)
        measure("entry correction, AMSGrad, 50% active, 24 changes", random_masks(0.5), 24, amsgrad=True)
        for density in (0.1, 0.5, 0.9):
            what = f"entry correction, drop, {density:.0%} active, 4 changes"
            measure(what, random_masks(density), 4, frozen_state="drop")
        for state in ("keep", "drop"):
            measure(f"10% of rows, {state}", random_masks(0.1, (ROWS, 1)), 2, target=3.0, frozen_state=state)
    return rows


def mask_change_without_compiler() -> list[Row]:
    """Setting new masks on all entries, against one fused step."""
    baseline, rows = fused(CPU), []
    with no_compiler():
        for state, density in (*product(("keep", "zero", "drop"), (0.1, 0.5)), ("drop", 0.9)):
            change = masked(random_masks(density), 4, frozen_state=state)[1]
            rows.append(paired_ratio(f"new entry masks, {state}, {density:.0%} active", change, baseline))
        drawn = paired_ratio(
            "drawing a random mask", lambda: hashing.bernoulli(1, 0.5, 0, ROWS * COLUMNS), baseline
        )
    return [*rows, drawn]


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "masked_step_without_compiler": masked_step_without_compiler,
    "mask_change_without_compiler": mask_change_without_compiler,
}
