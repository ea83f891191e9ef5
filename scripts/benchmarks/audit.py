"""What the audit costs a training step: the time spent in it, against the rest of the same steps."""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradpolicy as gp
from benchmarks.measure import Row, interval_of_median, one_thread
from gradpolicy.insight.audit import Audit
from gradpolicy.policies import Policy

STEPS, WARMUP, WINDOW = 620, 20, 20
"""Steps of a run, those that do not count, and those that are taken together: not every one has a look."""


class Perceptron(LightningModule):
    """Four layers of 512 units, 0.9 M entries, on 64 samples a step."""

    def __init__(self) -> None:
        super().__init__()
        widths = [512] * 4
        self.trunk = nn.Sequential(*(part for width in widths for part in (nn.LazyLinear(width), nn.ReLU())))
        self.head, self.probe = nn.Linear(512, 10), nn.Linear(512, 10)
        self.trunk(torch.zeros(1, 256))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch, of the head and of a probe beside it."""
        features = self.trunk(batch[0])
        losses = [nn.functional.cross_entropy(part(features), batch[1]) for part in (self.head, self.probe)]
        return losses[0] + losses[1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Says how long each step took and how much of it was spent in an audit."""

    def __init__(self, audit: Audit) -> None:
        self.steps: list[tuple[float, float]] = []
        self._spent = self._began = 0.0
        hooks = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")
        for hook in hooks:
            setattr(audit, hook, self._timed(getattr(audit, hook)))
        self._audit = audit

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self._spent += time.perf_counter() - began

        return timed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Times what the freezer calls, too."""
        frozen: Any = self._audit._frozen
        if frozen is not None:
            for method in ("before_masks", "after_masks"):
                setattr(frozen, method, self._timed(getattr(frozen, method)))

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Ends a step where the next begins."""
        now = time.perf_counter()
        self.steps.append((now - self._began, self._spent))
        self._began, self._spent = now, 0.0


def cost(what: str, policies: Mapping[str, Policy], target: float | None = None, **settings: Any) -> Row:
    """Trains with an audit.

    Args:
        what: What is measured, in words.
        policies: The policies.
        target: The most that a step with the audit may take, against the same without.
        **settings: The audit's.
    """
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(STEPS * 64, 256), torch.randint(10, (STEPS * 64,)))
    with tempfile.TemporaryDirectory() as directory:
        audit = Audit(directory, **settings)
        # After the audit, so that its last hook of a step is within the step.
        clock = Clock(audit)
        trainer = Trainer(
            accelerator="auto",
            devices=1,
            max_epochs=1,
            callbacks=[audit, gp.GradientPolicies(policies), clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
        )
        trainer.fit(Perceptron(), DataLoader(samples, batch_size=64))
    steps = clock.steps[WARMUP:]
    windows = [steps[first : first + WINDOW] for first in range(0, len(steps), WINDOW)]
    totals = [(sum(step for step, _ in window), sum(spent for _, spent in window)) for window in windows]
    ratios = [step / (step - spent) for step, spent in totals]
    low, middle, high = statistics.quantiles(ratios, n=4)
    at_least, at_most = interval_of_median(ratios)
    return {
        "what": what,
        "ratio": middle,
        "target": target,
        "unit": "time",
        "low": low,
        "high": high,
        "at_least": at_least,
        "at_most": at_most,
        "milliseconds": 1e3 * statistics.median(step for step, _ in totals) / WINDOW,
        "baseline_milliseconds": 1e3 * statistics.median(step - spent for step, spent in totals) / WINDOW,
    }


def masks(every: int | None = None, state: str = "keep") -> dict[str, Policy]:
    """Half of the trunk's entries at random, or one layer; the probe does not shape the trunk."""
    mask = gp.masks.Random(0.5, every=every) if every else gp.masks.Layerwise(active=1, every=10_000)
    return {
        "trunk": gp.Freeze(mask, params="trunk.*", frozen_state=state),
        "cut": gp.Stop(modules="probe"),
    }


def audit() -> list[Row]:
    """The default audit where masks stay, change at times, and change at each step; then the full one."""
    with one_thread():
        return [
            cost("sampled, whole layers frozen, masks stay", masks(), 1.01),
            cost("sampled, entries, masks change every 5 steps", masks(5), 1.01),
            cost("sampled, entries, masks change every step", masks(1), 1.01),
            cost("full, entries, masks change every 20 steps", masks(20), entries=None, every=100),
        ]


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"audit": audit}
