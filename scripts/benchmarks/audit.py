"""What the audit costs a training step: the time spent in it, against the rest of the same steps."""

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradpolicy as gp
from benchmarks.callback_cost import STEPS, Clock
from benchmarks.measure import Row, one_thread
from gradpolicy.insight.audit import Audit
from gradpolicy.policies import Policy


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
        clock = Clock(audit, lambda: audit._frozen)
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
    return clock.row(what, target)


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
