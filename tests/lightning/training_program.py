"""A small training run that a test kills: ``training_program.py FOLDER RANKS STEPS [FAULT]``."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradpolicy.lightning.checkpoints import WholeCheckpointIO
from gradpolicy.lightning.preemption import SaveOnPreemption


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Fault(Callback):
    """Does something bad on the last rank after three batches; ``announce`` waits to be signalled."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and self.kind == "announce":
            print(f"pid {os.getpid()}", flush=True)
        if trainer.global_step == 3 and trainer.global_rank == trainer.world_size - 1:
            if self.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "raises":
                raise ArithmeticError("on purpose")
        if trainer.global_step == 3 and trainer.global_rank == 0 and self.kind == "first_killed":
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, ranks: str, steps: str, fault: str = "none") -> None:
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(ranks),
        strategy="ddp" if int(ranks) > 1 else "auto",
        max_steps=int(steps),
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[WholeCheckpointIO()],
        callbacks=[
            ModelCheckpoint(dirpath=Path(folder) / "checkpoints", save_last=True, every_n_train_steps=10**6),
            SaveOnPreemption(),
            Fault(fault),
        ],
    )
    data = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))
    trainer.fit(Line(), DataLoader(data, batch_size=4), ckpt_path="last")
    print(f"finished at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
