"""The data: points in the plane, labelled by the spiral that they are on."""

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset


class Spirals(LightningDataModule):
    """Two spirals of points, in a training, a validation and a test part.

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
        place = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        place += noise * torch.randn(points, 2, generator=generator)
        last = points // 5
        self.parts = [
            TensorDataset(place[chosen], label[chosen])
            for chosen in (slice(2 * last, None), slice(last), slice(last, 2 * last))
        ]
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        """Return the training part, shuffled."""
        return DataLoader(self.parts[0], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation part."""
        return DataLoader(self.parts[1], self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """Return the test part."""
        return DataLoader(self.parts[2], self.batch_size)
