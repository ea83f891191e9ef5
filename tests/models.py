"""Small models that many tests train."""

from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class TwoLayers(LightningModule):
    """A trunk with a rounding activation, and a head; trained to tell two classes apart."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.round(self.trunk(x) * 4) / 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test/loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=0.05)


class Stack(nn.Module):
    """An embedding, four numbered blocks, a head."""

    def __init__(self, blocks: int = 4, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)
