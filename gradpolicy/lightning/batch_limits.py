"""Checks how many batches a trainer takes of the data, before Lightning fails on it."""

from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from gradpolicy.errors import PolicyError


class BatchLimits(Callback):
    """Checks the trainer's limits when the data is there, on every process."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The data is set up, and nothing was trained yet."""
        data = getattr(trainer, "datamodule", None)
        if stage == "fit" and data is not None:
            check_batches(trainer, data)


def check_batches(trainer: Trainer, data: LightningDataModule) -> None:
    """Makes sure that each limit leaves at least one batch, and that validation is reached.

    Args:
        trainer: The trainer.
        data: The data module, set up for training.

    Raises:
        PolicyError: For limits that Lightning would refuse when it begins to train.
    """
    training = _batches(data, "train_dataloader", trainer.limit_train_batches, "limit_train_batches")
    validation = _batches(data, "val_dataloader", trainer.limit_val_batches, "limit_val_batches")
    interval = getattr(trainer, "val_check_interval", None)
    if (
        training is not None
        and validation != 0
        and isinstance(interval, int)
        and trainer.check_val_every_n_epoch is not None
        and interval > training
    ):
        raise PolicyError(
            f"trainer.val_check_interval: {interval} given, but an epoch has {training} batches; "
            "trainer.check_val_every_n_epoch=null counts on from epoch to epoch"
        )


def _batches(data: LightningDataModule, loader: str, limit: float, name: str) -> float | None:
    """How many batches Lightning takes of a loader; None if the loader has no length."""
    if not is_overridden(loader, data, LightningDataModule):
        return None
    made: Any = getattr(data, loader)()
    length = None if isinstance(made, list | tuple | dict) else sized_len(made)
    if length is None:
        return None
    taken = min(length, limit) if isinstance(limit, int) else int(length * limit)
    if taken == 0 and length > 0 and limit > 0:
        raise PolicyError(f"trainer.{name}: {limit} given, but of {length} batches that is none")
    return taken
