"""Lightning modules of a model and its optimizer: classification, next-token prediction."""

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from gradpolicy.errors import PolicyError


class Task(LightningModule):
    """A model with an optimizer and optionally a learning-rate scheduler.

    Args:
        model: The model that is trained.
        optimizer: A function of the parameters that returns an optimizer, as from Hydra's ``_partial_:
            true``.
        scheduler: A function of the optimizer that returns a learning-rate scheduler.
        scheduler_interval: When the scheduler steps, ``"step"`` or ``"epoch"``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Any], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        scheduler_interval: str = "epoch",
    ) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.scheduler_interval = scheduler_interval

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's output."""
        return self.model(inputs)

    def assess(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch, and the values to log by their names.

        Args:
            batch: A batch of the loader.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method assess")

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """Log the values of a batch and return its loss."""
        loss, values = self.assess(batch)
        for name, value in values.items():
            self.log(f"train/{name}", value, prog_bar=name == "loss")
        return loss

    def validation_step(self, batch: Any, batch_index: int) -> None:
        """Log the validation values."""
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_index: int) -> None:
        """Log the test values."""
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Any) -> None:
        values = {f"{stage}/{name}": value for name, value in self.assess(batch)[1].items()}
        self.log_dict(
            values, prog_bar=stage == "val", on_epoch=True, sync_dist=True, batch_size=len(batch[0])
        )

    def build_optimizer(self) -> Optimizer:
        """Return a new optimizer of the parameters; one that chooses by names gets these too.

        Raises:
            PolicyError: For arguments that the optimizer refuses.
        """
        kind = getattr(self.make_optimizer, "func", self.make_optimizer)
        needs_names = getattr(kind, "needs_names", False)
        try:
            return self.make_optimizer(self.named_parameters() if needs_names else self.parameters())
        except (TypeError, ValueError) as error:
            raise PolicyError(f"optimizer: {error}") from error

    def configure_optimizers(self) -> Any:
        """Return the optimizer and, if there is one, its scheduler.

        Raises:
            PolicyError: If the module was created without an optimizer, as by a config that has none.
        """
        if self.make_optimizer is None:
            raise PolicyError("model.optimizer: is missing; name one, such as optimizer=adamw")
        optimizer = self.build_optimizer()
        if self.make_scheduler is None:
            return optimizer
        schedule = {"scheduler": self.make_scheduler(optimizer), "interval": self.scheduler_interval}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Classifier(Task):
    """Trains a classifier, and its probe if it has one, with cross-entropy.

    Arguments are those of :class:`Task`; the model returns logits of shape
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
        for part, logits in {"": getattr(output, "logits", output), "probe_": probe}.items():
            if logits is not None:
                losses[f"{part}loss"] = functional.cross_entropy(logits, labels)
                accuracies[f"{part}accuracy"] = (logits.argmax(dim=-1) == labels).float().mean()
        losses |= getattr(output, "losses", {})
        return torch.stack(list(losses.values())).sum(), losses | accuracies


class LanguageModel(Task):
    """Trains a model to predict the next token, with cross-entropy.

    Arguments are those of :class:`Task`; the model returns logits of shape
    (batch, length, vocabulary) for tokens of shape (batch, length). A batch is ``(tokens, next tokens)``.

    Logs ``{train,val,test}/loss`` in nats and ``…/bits_per_character``, the loss over ln 2, per token.
    """

    def assess(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss over a batch's tokens, and the same in bits."""
        tokens, following = batch
        loss = functional.cross_entropy(self(tokens).flatten(0, 1), following.flatten())
        return loss, {"loss": loss, "bits_per_character": loss / math.log(2)}
