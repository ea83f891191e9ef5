"""What it costs to have gradpolicy: its import, and its callback with nothing to do."""

import logging
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradpolicy as gp
from benchmarks.measure import Row, one_thread, paired_ratio


def import_time() -> list[Row]:
    """``import gradpolicy`` against ``import torch``, each in a fresh interpreter."""

    def importing(name: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", f"import {name}"], check=True)

    return [
        paired_ratio(
            "import gradpolicy / import torch",
            importing("gradpolicy"),
            importing("torch"),
            target=1.10,
            rounds=11,
            warmup=1,
        )
    ]


class _Network(LightningModule):
    """A convolutional network whose step takes some ten milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(1),
        )
        self.head = nn.Linear(32 * 16 * 16, 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _StepTimes(Callback):
    """Times a step from one batch's start to the next one's: the loader and every callback included."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.starts.append(time.perf_counter())

    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(after - before for before, after in pairwise(self.starts))


def _fit(callbacks: list[Callback]) -> Callable[[], float]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1600, 3, 16, 16), torch.randint(0, 10, (1600,)))

    def run() -> float:
        times = _StepTimes()
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[times, *callbacks],
        )
        trainer.fit(_Network(), DataLoader(data, batch_size=32))
        return times.median()

    return run


def callback_cost() -> list[Row]:
    """Training with the callback and no policy against Lightning without it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    candidate, baseline = _fit([gp.GradientPolicies({})]), _fit([])
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            paired_ratio(
                "a step with GradientPolicies({}) / without",
                candidate,
                baseline,
                target=1.01,
                rounds=24,
                warmup=1,
                seconds=lambda fit: fit(),
            ),
            paired_ratio(
                "a fit of 50 steps with GradientPolicies({}) / without",
                candidate,
                baseline,
                rounds=12,
                warmup=0,
            ),
        ]


BENCHMARKS = {"import": import_time, "callback": callback_cost}
