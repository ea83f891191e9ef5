"""The base class of Lightning modules: a model, and functions that return its optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
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

    def forward(self, inputs: torch.Tensor) -> Any:
        """Return the model's output."""
        return self.model(inputs)

    def assess(self, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a batch, and the values to log by their names.

        Args:
            batch: A batch of the loader.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method assess")

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
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
        """Return a new optimizer of the parameters; one that chooses by names gets these too."""
        kind = getattr(self.make_optimizer, "func", self.make_optimizer)
        needs_names = getattr(kind, "needs_names", False)
        return self.make_optimizer(self.named_parameters() if needs_names else self.parameters())

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
