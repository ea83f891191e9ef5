"""Classification as a Lightning module, with a probe if the model has one."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from gradpolicy.logits import class_logits
from gradpolicy.tasks.task import OptimizerFactory, SchedulerFactory, Task


class Classifier(Task):
    """Trains a classifier, and its probe if it has one, with cross-entropy.

    The loss is the head's cross-entropy plus the probe's. The policies of the run determine if the probe
    trains the trunk.

    Args:
        model: Returns logits of shape (batch, classes), or an object with `logits` and optionally
            `probe_logits`.
        optimizer: See :class:`~gradpolicy.tasks.task.Task`.
        scheduler: See :class:`~gradpolicy.tasks.task.Task`.
        scheduler_interval: See :class:`~gradpolicy.tasks.task.Task`.
        classes: Number of classes.

    Logs ``{train,val,test}/loss``, ``…/accuracy`` and, with a probe, ``…/probe_loss``, ``…/probe_accuracy``.
    Training values are those of the current batch, so a resumed run logs the same.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        scheduler_interval: str = "epoch",
        classes: int = 10,
    ) -> None:
        super().__init__(model, optimizer, scheduler, scheduler_interval)
        self.metrics = nn.ModuleDict(
            {
                f"{stage}_{name}": MulticlassAccuracy(classes, average="micro")
                for stage in ("val", "test")
                for name in ("accuracy", "probe_accuracy")
            }
        )

    def assess(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss of a batch, with its parts and the accuracies."""
        images, labels = batch
        output = self(images)
        losses = self.losses_of(output, labels)
        accuracies = {
            f"{part}accuracy": (logits.argmax(dim=-1) == labels).float().mean()
            for part, logits in _logits_of(output).items()
        }
        return torch.stack(list(losses.values())).sum(), {**losses, **accuracies}

    def evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        """Log the values of a batch."""
        images, labels = batch
        output = self(images)
        for name, loss in self.losses_of(output, labels).items():
            self.log(f"{stage}/{name}", loss, on_epoch=True, sync_dist=True, batch_size=len(images))
        for part, logits in _logits_of(output).items():
            metric = cast(Metric, self.metrics[f"{stage}_{part}accuracy"])
            metric.update(logits.argmax(dim=-1), labels)
            self.log(f"{stage}/{part}accuracy", metric, on_epoch=True, prog_bar=stage == "val")

    def losses_of(self, output: Any, labels: Tensor) -> dict[str, Tensor]:
        """Return the parts of the loss by name; the loss is their sum."""
        return {
            f"{part}loss": functional.cross_entropy(logits, labels)
            for part, logits in _logits_of(output).items()
        }


def _logits_of(output: Any) -> dict[str, Tensor]:
    """Return the logits of the head and of the probe, if there is one, by the prefix of their values."""
    logits = {"": class_logits(output)}
    if getattr(output, "probe_logits", None) is not None:
        logits["probe_"] = output.probe_logits
    return logits
