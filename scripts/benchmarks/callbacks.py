"""The cost of importing gradpolicy, and of its callbacks in a training step."""

import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

import gradpolicy as gp
from benchmarks.measure import Row, is_quick, one_thread, paired_ratio, time_row
from gradpolicy.insight.record import Record
from gradpolicy.policies import Policy
from gradpolicy.tasks import Classifier, DigitsDataModule
from gradpolicy.tasks.models import QuantizedConvNet

# The numbers of warm-up steps, and of steps that are averaged, since not each writes to a file.
WARMUP, WINDOW = 20, 100
HOOKS = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")
OBSERVED = ("before_masks", "after_masks", "take_gradients", "measure")


def import_time() -> list[Row]:
    """``import gradpolicy`` against ``import torch``, each in a fresh interpreter."""

    def importing(name: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", f"import {name}"], check=True)

    what = "import gradpolicy / import torch"
    return [paired_ratio(what, importing("gradpolicy"), importing("torch"), target=1.10, rounds=11, warmup=1)]


class Clock(Callback):
    """Measures the time of each step, and the part of it spent in a callback. It must be the last callback.

    Args:
        callback: The callback.
        observer: Returns what the callback lets a freezer call, once training has started, or None.
    """

    def __init__(self, callback: Callback, observer: Callable[[], object]) -> None:
        self.steps: list[tuple[float, float]] = []
        self._spent = self._began = 0.0
        self._observer = observer
        self._time(callback, HOOKS)

    def _time(self, called: object, methods: Iterable[str]) -> None:
        for method in methods:
            if hasattr(called, method):
                setattr(called, method, partial(self._timed, getattr(called, method)))

    def _timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self._spent += time.perf_counter() - began

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Also time the calls by the freezer."""
        self._time(self._observer(), OBSERVED)

    def on_train_batch_end(self, *arguments: Any) -> None:
        """End a step where the next begins."""
        now = time.perf_counter()
        self.steps.append((now - self._began, self._spent))
        self._began, self._spent = now, 0.0

    def row(self, what: str, target: float | None = None) -> Row:
        """Return the row of a table: the time of steps with the callback relative to that without it."""
        steps = self.steps[WARMUP:]
        windows = [steps[first : first + WINDOW] for first in range(0, len(steps), WINDOW)]
        taken = [sum(step for step, _ in window) / len(window) for window in windows]
        without = [sum(step - spent for step, spent in window) / len(window) for window in windows]
        ratios = [with_it / rest for with_it, rest in zip(taken, without, strict=True)]
        return time_row(what, ratios, taken, without, target)


def record_cost(what: str, policies: Mapping[str, Policy], target: float | None = None) -> Row:
    """Return the cost of a record for the default job's network, on one thread."""
    torch.manual_seed(0)
    network = QuantizedConvNet(size=8, classes=10, width=32, levels=4, dropout=0.25)
    model = Classifier(network, partial(torch.optim.AdamW, lr=1e-3))
    with tempfile.TemporaryDirectory() as folder, one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record, callback = Record(folder), gp.GradientPolicies(policies)
        clock = Clock(record, lambda: callback.run.measurements)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=WARMUP + WINDOW * (2 if is_quick() else 10),
            # As conf/trainer/default.yaml.
            log_every_n_steps=10,
            limit_val_batches=0,
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[record, callback, clock],
        )
        trainer.fit(model, DigitsDataModule(batch_size=64, seed=0))
    return clock.row(what, target)


def record() -> list[Row]:
    """The default job, and one whose masks change at every step."""
    # As conf/train.yaml.
    default = {
        "stop": gp.Stop(modules="model.probe"),
        "straight_through": gp.StraightThrough(ops=["round"]),
        "random_freeze": gp.Freeze(
            gp.masks.Random(density=0.5, every=5), params="model.trunk.*", frozen_state="zero"
        ),
    }
    each_step = {"random": gp.Freeze(gp.masks.Random(density=0.1, every=1), params="*")}
    return [
        record_cost("the default job", default, 1.01),
        record_cost("masks of all parameters anew each step", each_step),
    ]


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"import": import_time, "record": record}
