"""A small recorded run."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

import gradpolicy as gp
from gradpolicy.insight.record import Record
from gradpolicy.tasks import DigitsDataModule
from gradpolicy.train.lightning.resume import ExactResume


class Network(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(torch.round(8 * self.trunk(batch[0])) / 8), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(
    folder: Path,
    *more: Callback,
    resume: Path | None = None,
    accelerator: str = "cpu",
    master_weights: bool = False,
    **settings: Any,
) -> None:
    """Trains the network, and records that in a folder."""
    torch.manual_seed(0)
    phases = gp.When(phases=("fit", "validate"))
    policies = {
        "trunk": gp.Freeze(gp.masks.Random(0.5, every=3), params="trunk.*", frozen_state="drop"),
        "rounding": gp.StraightThrough(ops=["round"], when=phases),
    }
    made = gp.GradientPolicies(policies, master_weights=master_weights)
    trainer = Trainer(
        accelerator=accelerator,
        max_epochs=-1,
        log_every_n_steps=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ExactResume(), Record(folder), made, *more],
        **settings,
    )
    trainer.fit(Network(), DigitsDataModule(batch_size=64, seed=0), ckpt_path=resume, weights_only=True)
