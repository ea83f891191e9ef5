"""The cost of masks in time and memory of an optimizer: every figure with its bound, in one table.

Times are ratios to the same optimizer's fastest implementation in torch, on the same entries, timed
alternately.
"""

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradpolicy as gp
from benchmarks.measure import HERE, Row, Step, device_seconds, one_thread, paired_ratio
from gradpolicy import MaskedOptimizer
from gradpolicy.freezing import Freezer
from gradpolicy.tensors.seeded import bernoulli, derive

Shapes = Sequence[tuple[int, ...]]
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

ENTRIES = 20_000_000
LARGE = [(4000, 5000)]
"""One weight of so many entries."""
SMALL = [(64,)] * 200
MANY_CHANGES = 40
ADAM_BYTES = 8
"""Adam's two moments, a float32 entry."""


def lion(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The Lion of pytorch_optimizer, which has no fused form."""
    import pytorch_optimizer

    return pytorch_optimizer.Lion(parameters, foreach=True)


adamw: Make = functools.partial(torch.optim.AdamW, fused=True)
sgd: Make = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True)
adagrad: Make = functools.partial(torch.optim.Adagrad, fused=HERE.type == "cpu")
OPTIMIZERS: dict[str, tuple[Make, float | None, float | None]] = {
    "AdamW": (adamw, 1.3, 1.7),
    "SGD with momentum": (sgd, 1.3, 1.3),
    "RMSprop": (functools.partial(torch.optim.RMSprop, foreach=True), 1.3, 1.3),
    "Adagrad": (adagrad, 1.3, 1.3),
    "Lion": (lion, 1.3, 1.3),
    "NAdam": (functools.partial(torch.optim.NAdam, foreach=True), None, None),
    "RAdam": (functools.partial(torch.optim.RAdam, foreach=True), None, None),
}
"""Each in its fastest form, with the bounds for `bias_correction` "tensor" and "entry"."""


def transformer(width: int = 384, layers: int = 12, vocabulary: int = 256, context: int = 256) -> Shapes:
    """The parameters of a transformer: by default 21.5 M in 148 tensors."""
    vector, square = (width,), (width, width)
    wide = [(3 * width, width), (3 * width,), square, vector]
    feedforward = [(4 * width, width), (4 * width,), (width, 4 * width), vector]
    layer = [vector, vector, *wide, vector, vector, *feedforward]
    return [(vocabulary, width), (context, width), *layer * layers, vector, vector]


def weights(shapes: Shapes = LARGE, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters with gradients."""
    made = [nn.Parameter(torch.randn(shape, device=HERE, dtype=dtype)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def unmasked(make: Make = adamw, shapes: Shapes = LARGE, dtype: torch.dtype = torch.float32) -> Step:
    """A step of torch's own optimizer, with existing state."""
    optimizer = make(weights(shapes, dtype))
    optimizer.step()
    return optimizer.step


def draw(optimizer: MaskedOptimizer, density: float, key: int, rows: bool = False) -> dict[Tensor, Tensor]:
    """A random mask of entries or rows for each parameter."""
    masks: dict[Tensor, Tensor] = {}
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        shape = (len(parameter), *[1] * (parameter.dim() - 1)) if rows else parameter.shape
        flags = bernoulli(derive(key, number), density, 0, prod(shape), parameter.device)
        masks[parameter] = flags.view(shape)
    return masks


def masked(
    make: Make = adamw,
    shapes: Shapes = LARGE,
    density: float = 0.5,
    *,
    changes: int = 4,
    rows: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> MaskedOptimizer:
    """A wrapped optimizer whose masks have changed some times, a step after each."""
    optimizer = MaskedOptimizer(make(weights(shapes, dtype)), **options)
    optimizer.step()
    for change in range(changes):
        optimizer.set_masks(draw(optimizer, density, change, rows))
        optimizer.step()
    return optimizer


def changing(optimizer: MaskedOptimizer, density: float) -> Step:
    """Sets other masks of entries at each call."""
    masks = [draw(optimizer, density, key) for key in (-1, -2)]

    def change() -> None:
        masks.reverse()
        optimizer.set_masks(masks[0])

    return change


def ratio(what: str, candidate: Step, baseline: Step, target: float | None = None, rounds: int = 15) -> Row:
    """`paired_ratio` on the device there is."""
    return paired_ratio(
        what, candidate, baseline, target=target, rounds=rounds, warmup=2, seconds=device_seconds
    )


def entry_masks() -> Iterator[Row]:
    """A step with entry masks, half of the entries active."""
    baseline = unmasked()
    yield ratio("AdamW against itself: the noise of this machine", baseline, baseline)
    for name, (make, *targets) in OPTIMIZERS.items():
        baseline = unmasked(make)
        for correction, target in zip(("tensor", "entry"), targets, strict=True):
            step = masked(make, changes=MANY_CHANGES, bias_correction=correction).step
            yield ratio(f"{name}, entries, {correction}, {MANY_CHANGES} changes", step, baseline, target)
    baseline = unmasked(dtype=torch.bfloat16)
    for correction in ("tensor", "entry"):
        step = masked(changes=MANY_CHANGES, dtype=torch.bfloat16, bias_correction=correction).step
        yield ratio(f"AdamW in bfloat16, entries, {correction}, {MANY_CHANGES} changes", step, baseline)


def master_weights() -> list[Row]:
    """A step of bfloat16 weights that are updated as float32, on one thread."""
    rows = []
    with one_thread():
        baselines = {dtype: unmasked(dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
        for what, options in (
            ("all entries", {"density": 1.0}),
            ("half of the entries, tensor", {"bias_correction": "tensor"}),
            ("half of the entries, entry", {"bias_correction": "entry"}),
        ):
            step = masked(dtype=torch.bfloat16, master_weights=True, **options).step
            for dtype, baseline in baselines.items():
                rows.append(ratio(f"AdamW, {what}, against fused AdamW in {dtype}", step, baseline))
    return rows


def row_masks() -> Iterator[Row]:
    """A step with row masks, whose cost depends on the active rows."""
    for name, make in (("AdamW", adamw), ("SGD with momentum", sgd)):
        for length in (1000, 5000):
            shapes = [(ENTRIES // length, length)]
            baseline = unmasked(make, shapes)
            for density, target in ((0.1, 0.4), (0.5, 1.15)):
                step = masked(make, shapes, density, rows=True).step
                yield ratio(f"{name}, {density:.0%} of rows of {length}", step, baseline, target)


def many_tensors() -> Iterator[Row]:
    """A step of a model with many tensors, most of them small."""
    for name, shapes, targets in (
        ("a transformer, 21 M in 148 tensors", transformer(), (1.6, 2.0)),
        ("200 tensors of 64 entries", SMALL, (2.0, 2.0)),
    ):
        baseline = unmasked(shapes=shapes)
        for correction, target in zip(("tensor", "entry"), targets, strict=True):
            step = masked(shapes=shapes, bias_correction=correction).step
            yield ratio(f"{name}: {correction}", step, baseline, target)
        step = masked(shapes=shapes, density=0.1, frozen_state="drop").step
        yield ratio(f"{name}: entry, drop, 10% active", step, baseline, targets[-1])


def mask_changes() -> Iterator[Row]:
    """New masks of entries, against one fused step."""
    baseline = unmasked()
    for state, density in itertools.product(("keep", "zero", "drop"), (0.1, 0.5, 0.9)):
        change = changing(masked(density=density, frozen_state=state), density)
        yield ratio(f"new entry masks, {state}, {density:.0%} active", change, baseline, 5.0)
    tensors = [(64,)] * 5000
    for state in ("keep", "zero", "drop"):
        change = changing(masked(shapes=tensors, frozen_state=state, changes=1), 0.5)
        seconds = min(device_seconds(change, calls=1) for _ in range(7))
        yield {
            "what": f"set_masks for 5,000 tensors of 64, {state}",
            "ratio": seconds,
            "target": 0.4,
            "unit": "s",
        }


def memory() -> Iterator[Row]:
    """The memory that `drop` holds, and the additional memory while masks change."""
    for name, rows, target in (("entries", False, 0.16), ("rows", True, 0.11)):
        held = masked(density=0.1, rows=rows, frozen_state="drop").state_bytes()
        share = held / (ADAM_BYTES * ENTRIES)
        yield {
            "what": f"drop, 10% of {name}, of Adam's state",
            "ratio": share,
            "target": target,
            "unit": "bytes",
        }
    for state, density in (("keep", 0.5), ("zero", 0.5), ("drop", 0.1), ("drop", 0.5), ("drop", 0.9)):
        yield {
            "what": f"peak while masks change, {state}, {density:.0%} active, of a float32 tensor",
            "ratio": peak_of_changes(state, density) / (4 * ENTRIES),
            "target": 1.0,
            "unit": "bytes",
        }


def peak_of_changes(state: str, density: float) -> int:
    """By how many bytes memory grows while masks change."""
    return apart(_peak_here, state, density)


def apart(measure: Callable[..., int], *arguments: object) -> int:
    """Measure memory; on a CPU in a process of its own.

    What malloc keeps of freed memory would hide a part. There it gives freed tensors back at once.
    """
    if HERE.type == "cuda":
        return measure(*arguments)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(measure, *arguments).result()
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def _peak_here(state: str, density: float) -> int:
    change = changing(masked(density=density, frozen_state=state), density)
    change()
    return peak_bytes(change)


def peak_bytes(function: Step) -> int:
    """The peak of additional memory while a function runs."""
    if HERE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # Linux then counts the peak from here.
    before = _resident("VmRSS")
    function()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _freezer_step(freezer: Freezer, optimizer: MaskedOptimizer, steps: Iterator[int]) -> None:
    freezer.begin_step(next(steps))
    freezer.observe(optimizer)
    optimizer.step()


def freezer_step() -> Iterator[Row]:
    """A whole step of a freeze policy without clipping, and the update alone."""
    baseline = unmasked()
    for level, what in (("entry", "10% of entries"), ("row", "10% of rows of 5000")):
        parameters = weights()
        optimizer = MaskedOptimizer(adamw(parameters))
        policy = gp.Freeze(gp.masks.Random(0.1, level=level, every=1 << 30), params="weight")
        model = torch.nn.Module()
        model.register_parameter("weight", parameters[0])
        freezer = Freezer(model, [optimizer], {"trunk": policy})

        step = functools.partial(_freezer_step, freezer, optimizer, itertools.count())
        step()
        alone = ratio(f"{what}: the update alone", optimizer.step, baseline)
        yield alone
        yield ratio(f"{what}: begin_step, observe, step", step, baseline, round(alone["ratio"] + 0.1, 3))


PARTS = [entry_masks, row_masks, many_tensors, mask_changes, memory, freezer_step]


def optimizers() -> list[Row]:
    """All figures with a bound."""
    return [row for part in PARTS for row in part()]


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "optimizers": optimizers,
    "master_weights": master_weights,
}
