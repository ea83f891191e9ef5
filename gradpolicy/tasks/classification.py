"""Classification as a Lightning module, with a probe where the model has one."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from gradpolicy.errors import PolicyError
from gradpolicy.insight.attribution import class_logits

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


class Classifier(LightningModule):
    """Trains a classifier with cross-entropy, and its probe beside it.

    The loss is the head's cross-entropy plus the probe's. Whether the probe shapes the trunk is not decided
    here but by the policies of the run.

    Args:
        model: Gives logits of shape (batch, classes), or something with `logits` and `probe_logits`.
        optimizer: Makes the optimizer of an iterable of parameters, as Hydra's ``_partial_: true`` gives it.
        scheduler: Makes a learning-rate scheduler of the optimizer.
        scheduler_interval: When the scheduler steps, ``"step"`` or ``"epoch"``.
        classes: Number of classes.

    Logs ``{train,val,test}/loss``, ``…/accuracy`` and, with a probe, ``…/probe_loss``, ``…/probe_accuracy``.
    Training values are those of the batch: they need no memory that a resumed run would have lost.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        scheduler_interval: str = "epoch",
        classes: int = 10,
    ) -> None:
        super().__init__()
        if scheduler_interval not in ("step", "epoch"):
            raise PolicyError(f"scheduler_interval: {scheduler_interval!r} given, 'step' or 'epoch' needed")
        self.model = model
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.scheduler_interval = scheduler_interval
        self.metrics = nn.ModuleDict(
            {
                f"{stage}_{name}": MulticlassAccuracy(classes, average="micro")
                for stage in ("val", "test")
                for name in ("accuracy", "probe_accuracy")
            }
        )

    def forward(self, images: Tensor) -> Any:
        """What the model gives."""
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """The summed loss of a batch."""
        losses, predictions = self._assess(batch)
        for name, loss in losses.items():
            self.log(f"train/{name}", loss, prog_bar=name == "loss")
        for name, predicted in predictions.items():
            self.log(f"train/{name}", (predicted == batch[1]).float().mean())
        return torch.stack(list(losses.values())).sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        """Logs the validation values."""
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        """Logs the test values."""
        self._evaluate("test", batch)

    def configure_optimizers(self) -> Any:
        """The optimizer and, if there is one, its scheduler."""
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        schedule = {"scheduler": self.make_scheduler(optimizer), "interval": self.scheduler_interval}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        losses, predictions = self._assess(batch)
        for name, loss in losses.items():
            self.log(f"{stage}/{name}", loss, on_epoch=True, sync_dist=True, batch_size=len(images))
        for name, predicted in predictions.items():
            metric = cast(Metric, self.metrics[f"{stage}_{name}"])
            metric.update(predicted, labels)
            self.log(f"{stage}/{name}", metric, on_epoch=True, prog_bar=stage == "val")

    def _assess(self, batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses and predicted classes of the head and, where there is one, of the probe."""
        images, labels = batch
        output = self(images)
        logits = class_logits(output)
        probe_logits = getattr(output, "probe_logits", None)
        losses = {"loss": functional.cross_entropy(logits, labels)}
        predictions = {"accuracy": logits.argmax(dim=-1)}
        if probe_logits is not None:
            losses["probe_loss"] = functional.cross_entropy(probe_logits, labels)
            predictions["probe_accuracy"] = probe_logits.argmax(dim=-1)
        return losses, predictions
