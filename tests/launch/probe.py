"""Says for a test which rank ran with which values."""

import json
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer


class Probe(Callback):
    """Writes rank, learning rate and command line."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes a file a rank; it adds a line, so that a second run would show."""
        said = {"rank": trainer.global_rank, "lr": trainer.optimizers[0].param_groups[0]["lr"]}
        with (self.directory / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(said) + "\n")
