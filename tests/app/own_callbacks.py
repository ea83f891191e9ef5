"""Callbacks and a model of a person's own."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from gradpolicy.tasks import QuantizedConvNet


def chosen(name: str, **arguments: str) -> tuple[str, ...]:
    """Return the overrides by which a run has a callback of this module."""
    more = [f"+callbacks.own.{key}={value}" for key, value in arguments.items()]
    return f"+callbacks.own._target_={__name__}.{name}", *more


class Pooled(QuantizedConvNet):
    """Has a last layer that the loss does not depend on."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.pooler = nn.Linear(4, 4)


class Probe(Callback):
    """Writes which rank ran with which learning rate."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes a file a rank; it adds a line, so that a second run would show."""
        said = {"rank": trainer.global_rank, "lr": trainer.optimizers[0].param_groups[0]["lr"]}
        with (self.directory / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(said) + "\n")


class Moves(Callback):
    """Writes to a weight after each batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *others: object) -> None:
        with torch.no_grad():
            pl_module.model.trunk[0].conv.weight.add_(1)


class Fails(Callback):
    """Raises an error in a run of one step."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.max_steps == 1:
            logging.getLogger("mine").info("about to fail")
            raise ArithmeticError("on purpose")
