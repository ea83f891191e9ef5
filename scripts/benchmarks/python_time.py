"""What Python and Triton take for a step on a GPU, against torch's fused step on the same tensors.

Needs no GPU: small tensors of a CPU stand for those of one, and what takes the place of CUDA's driver runs
no kernel. The time that the driver itself takes for a launch is not in it.
"""

import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.device import HERE
from benchmarks.many_tensors import Row, Shapes, fused, masked, random_masks
from benchmarks.measure import one_thread, paired_ratio
from gradpolicy import MaskedOptimizer
from gradpolicy.machinery import launching
from gradpolicy.optim.gpu import moves
from gradpolicy.optim.gpu.moves import Flagged
from gradpolicy.optim.native.moves import Survey

SHAPE = (4, 4)
CALLS = 1000
"""Steps of one tensor to a timing; fewer of many."""


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within, tensors of a CPU go the way of a GPU's, up to where kernels would start."""
    if HERE.type != "cpu":
        yield
        return
    driver = importlib.import_module("stand_in_gpu.driver")
    driver.begin()
    survey, survey_many, index_many = moves.survey, moves.survey_many, moves.index_many

    def seen(flags: Tensor, codes: Tensor | None) -> Survey:
        survey(flags, codes)
        return Survey(flags.numel() // 2, False)

    def all_seen(members: Sequence[Flagged]) -> list[tuple[int, bool]]:
        survey_many(members)
        return [(flags.numel() // 2, True) for _, flags in members]

    def all_indexed(members: Sequence[tuple[Tensor, Tensor | None]]) -> list[Survey]:
        found = index_many(members) or []
        looks = zip(found, members, strict=True)
        return [Survey(flags.numel() // 2, False, each.index) for each, (flags, _) in looks]

    with ExitStack() as stack:
        for place, name, stand_in in (
            (launching, "DEVICES", {"cpu"}),
            (moves, "survey", seen),
            (moves, "survey_many", all_seen),
            (moves, "index_many", all_indexed),
        ):
            stack.enter_context(mock.patch.object(place, name, stand_in))
        yield


def _seconds(count: int) -> Callable[[Callable[[], Any]], float]:
    """Times a call: of this thread alone, and of many in a row."""
    calls = max(CALLS // count, 1)

    def seconds(function: Callable[[], Any]) -> float:
        start = time.thread_time()
        for _ in range(calls):
            function()
        return (time.thread_time() - start) / calls

    return seconds


def _with_new_gradients(optimizer: MaskedOptimizer) -> Callable[[], None]:
    """A step whose gradients lie elsewhere than those of the last one."""
    members = optimizer.param_groups[0]["params"]
    gradients = itertools.cycle([[torch.randn_like(parameter) for parameter in members] for _ in range(2)])

    def step() -> None:
        for parameter, gradient in zip(members, next(gradients), strict=True):
            parameter.grad = gradient
        optimizer.step()

    return step


def _changing(optimizer: MaskedOptimizer) -> Callable[[], None]:
    masks = itertools.cycle([random_masks(optimizer, 0.5) for _ in range(2)])
    return lambda: optimizer.set_masks(next(masks))


def python_time() -> list[Row]:
    """Steps and changes of masks of one tensor and of a hundred."""
    rows: list[Row] = []
    for count, target in ((1, 1.5), (100, 1.2)):
        shapes: Shapes = [SHAPE] * count
        with as_on_a_gpu(), one_thread():
            baseline = fused(shapes).step
            tried: dict[str, Callable[[], object]] = {
                "tensor correction": masked(shapes, bias_correction="tensor").step,
                "entry correction": masked(shapes).step,
                "entry correction, drop": masked(shapes, frozen_state="drop").step,
                "entry correction, gradients elsewhere at each step": _with_new_gradients(masked(shapes)),
                "new entry masks, keep": _changing(masked(shapes)),
                "new entry masks, zero": _changing(masked(shapes, frozen_state="zero")),
                "new entry masks, drop": _changing(masked(shapes, frozen_state="drop")),
            }
            for what, candidate in tried.items():
                name = f"{count} tensor{'s' if count > 1 else ''}: {what}"
                limit = target if what.endswith("correction") else None
                rows.append(
                    paired_ratio(name, candidate, baseline, target=limit, rounds=8, seconds=_seconds(count))
                )
    return rows


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"python_time": python_time}
