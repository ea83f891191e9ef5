"""A callback that ends a sweep's job if its metric is not logged."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from gradpolicy.errors import PolicyError, nearest

# Tests and callbacks may log these later than in the first epoch.
LATER = ("test/", "policy/", "cost/", "curvature/")


class RequiredMetric(Callback):
    """Raises an error after the first epoch, and its validation, if a metric was not logged.

    Args:
        name: The metric; or, as ``…_best``, the best value of one that a ``ModelCheckpoint`` monitors.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the metric is among those logged so far.

        Raises:
            PolicyError: If it is not, with the nearest names.
        """
        checkpoints: list[Any] = trainer.checkpoint_callbacks
        monitored = [
            each.monitor for each in checkpoints if isinstance(each, ModelCheckpoint) and each.monitor
        ]
        known = {*trainer.callback_metrics, *(f"{name}_best" for name in monitored)}
        if self.name not in known and not self.name.startswith(LATER):
            raise PolicyError(f"optimized_metric: {self.name!r} is not logged; {nearest(self.name, known)}")
