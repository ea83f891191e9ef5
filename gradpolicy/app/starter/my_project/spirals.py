"""Points in the plane, labelled by the spiral that they are on, and a network that tells which."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradpolicy.tasks.loading import DataModule


class Spirals(DataModule):
    """Two spirals of points, in a training, a validation and a test set.

    Args:
        points: The number of points.
        noise: The standard deviation of their distance from the spiral.
        batch_size: The number of points per batch.
        seed: The seed of the points and of their order.
    """

    def __init__(self, points: int = 1200, noise: float = 0.05, batch_size: int = 64, seed: int = 0) -> None:
        super().__init__(batch_size, seed)
        generator = torch.Generator().manual_seed(seed)
        label = torch.arange(points) % 2
        radius = torch.rand(points, generator=generator)
        angle = 6 * radius + torch.pi * label
        position = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        position += noise * torch.randn(points, 2, generator=generator)
        sizes = [points // 5, points // 5, points - 2 * (points // 5)]
        parts = zip(position.split(sizes), label.split(sizes), strict=True)
        self.validation_set, self.test_set, self.train_set = (TensorDataset(*part) for part in parts)


class Network(nn.Module):
    """A network with rounded activations, which returns the scores of both spirals.

    Args:
        width: The size of the hidden layers.
        levels: Activations are rounded to multiples of ``1 / levels``.
    """

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )
        self.head = nn.Linear(width, 2)
        self.levels = levels

    def forward(self, points: Tensor) -> Tensor:
        """Return the scores. The derivative of `round` is zero, so a policy passes the gradient."""
        return self.head(torch.round(self.trunk(points) * self.levels) / self.levels)
