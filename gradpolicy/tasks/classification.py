"""Classification as a Lightning module, with a probe if the model has one."""

import torch
from torch import Tensor
from torch.nn import functional

from gradpolicy.logits import class_logits
from gradpolicy.tasks.task import Task


class Classifier(Task):
    """Trains a classifier, and its probe if it has one, with cross-entropy.

    Arguments are those of :class:`~gradpolicy.tasks.task.Task`; the model returns logits of shape
    (batch, classes), or an object with `logits` and optionally `probe_logits`, and `losses` by name. The loss
    is the head's cross-entropy plus the probe's plus these. The policies of the run determine if the probe
    trains the trunk.

    Logs ``{train,val,test}/loss``, ``…/accuracy``, the model's losses and, with a probe, ``…/probe_loss`` and
    ``…/probe_accuracy``.
    """

    def assess(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss of a batch, with its parts and the accuracies."""
        images, labels = batch
        output = self(images)
        probe = getattr(output, "probe_logits", None)
        losses, accuracies = {}, {}
        for part, logits in {"": class_logits(output), "probe_": probe}.items():
            if logits is not None:
                losses[f"{part}loss"] = functional.cross_entropy(logits, labels)
                accuracies[f"{part}accuracy"] = (logits.argmax(dim=-1) == labels).float().mean()
        losses |= getattr(output, "losses", {})
        return torch.stack(list(losses.values())).sum(), losses | accuracies
