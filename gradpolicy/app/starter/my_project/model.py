"""The Lightning module: a trunk whose last activations are rounded, and a head."""

from collections.abc import Callable

import torch
from lightning import LightningModule
from torch import Tensor, nn


class Classifier(LightningModule):
    """A classifier of points in the plane.

    Args:
        width: The size of the hidden layers.
        levels: Activations are rounded to multiples of ``1 / levels``.
        optimizer: Returns the optimizer of the given parameters.
    """

    def __init__(
        self, optimizer: Callable[..., torch.optim.Optimizer], width: int = 64, levels: int = 4
    ) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )
        self.head = nn.Linear(width, 2)
        self.levels = levels
        self.make_optimizer = optimizer

    def forward(self, points: Tensor) -> Tensor:
        """Return the scores of both classes.

        The derivative of `round` is zero, so a policy passes the gradient.
        """
        return self.head(torch.round(self.trunk(points) * self.levels) / self.levels)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        return self._loss("train", batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Log loss and accuracy."""
        self._loss("val", batch)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        """Log loss and accuracy."""
        self._loss("test", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer, which the policies wrap."""
        return self.make_optimizer(self.parameters())

    def _loss(self, stage: str, batch: list[Tensor]) -> Tensor:
        points, labels = batch
        scores = self(points)
        loss = nn.functional.cross_entropy(scores, labels)
        accuracy = (scores.argmax(1) == labels).float().mean()
        values = {f"{stage}/loss": loss, f"{stage}/accuracy": accuracy}
        self.log_dict(values, on_step=False, on_epoch=True, prog_bar=stage == "val")
        return loss
