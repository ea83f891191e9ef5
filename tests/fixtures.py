"""Small models, and the fixtures that all tests share."""

import functools
import io
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradpolicy as gp


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """The same seed for each test, and nothing of what a run before it set for the whole process."""
    torch.manual_seed(0)
    root, deterministic = logging.getLogger(), torch.are_deterministic_algorithms_enabled()
    level = root.level
    # Lightning leaves its port there, and its seed.
    with patch.dict(os.environ):
        yield
    root.setLevel(level)
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)


def through_a_file(value: Any, *, weights_only: bool = True) -> Any:
    """Return what comes back when this is saved and loaded."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


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


@pytest.fixture
def two_layers() -> TwoLayers:
    return TwoLayers()


@pytest.fixture
def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)


def quiet_trainer(**settings: Any) -> Trainer:
    """Return a trainer on the CPU that writes nothing; keyword arguments as Trainer's."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**defaults, **settings})


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """Makes a quiet trainer for the test's directory."""
    return functools.partial(quiet_trainer, default_root_dir=tmp_path)


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


@pytest.fixture
def stack() -> Stack:
    return Stack()


@pytest.fixture
def moves() -> Callable[..., list[float]]:
    """Tells how far SGD at the rate 1 moves a weight in each step, for a gradient of 1."""

    def of(policies: Any, steps: int = 6, halves: bool = False, **settings: Any) -> list[float]:
        """Keyword arguments as training's; a scheduler may halve the rate after each step."""
        model = nn.Linear(1, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if halves else None
        found = []
        with gp.training(model, optimizer, policies, **settings) as masked:
            for _ in range(steps):
                before = model.weight.item()
                model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
                masked.step()
                masked.zero_grad()
                found.append(round(before - model.weight.item(), 12))
                if scheduler is not None:
                    scheduler.step()
        return found

    return of


@pytest.fixture
def tokens() -> Tensor:
    return torch.arange(24).reshape(4, 6) % 6
