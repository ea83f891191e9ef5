"""Points in the plane, labelled by the spiral that they are on, and a network that tells which."""

import torch
from lightning import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Spirals(LightningDataModule):
    """Two spirals of points, in a training, a validation and a test split.

    Args:
        points: The number of points.
        noise: The standard deviation of their distance from the spiral.
        batch_size: The number of points per batch.
        seed: The seed of the points.
    """

    def __init__(self, points: int = 1200, noise: float = 0.05, batch_size: int = 64, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        label = torch.arange(points) % 2
        radius = torch.rand(points, generator=generator)
        angle = 6 * radius + torch.pi * label
        position = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        position += noise * torch.randn(points, 2, generator=generator)
        last = points // 5
        self.splits = [
            TensorDataset(position[chosen], label[chosen])
            for chosen in (slice(2 * last, None), slice(last), slice(last, 2 * last))
        ]
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        """Return the training split, shuffled."""
        return DataLoader(self.splits[0], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation split."""
        return DataLoader(self.splits[1], self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """Return the test split."""
        return DataLoader(self.splits[2], self.batch_size)


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
