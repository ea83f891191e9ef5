"""What all tests share: one thread, a seed, a small model and a small trainer; and which cases are slow.

torch and Lightning are imported by the fixtures, since the process that starts the workers needs neither.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import Tensor
    from torch.utils.data import DataLoader

    from tests.models import Stack, TwoLayers

pytest_plugins = ["tests.support_matrix"]

# A loop of DTensor.full_tensor on two gloo ranks, with torch 2.13 alone, corrupts the heap of a rank about
# once in 500,000 calls. So a test of which a rank died is run once more, and counted as a rerun. Only tests
# with ranks have the mark: its plugin lets a worker ask the process that started it, 40 ms a test.
ON_RANKS = {"pair", "pools", "ranks"}
RUN_AGAIN = pytest.mark.flaky(reruns=1, only_rerun="the process died")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave the many objects that imports make, and that stay, out of garbage collection."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Of a test that is mostly slow every fourth case is quick: all of them run in one suite or the other.

    Tests that need seven processes run on one worker, since these take long to start.
    """
    cases: Counter[tuple[Path, str]] = Counter()
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if ON_RANKS.intersection(fixtures):
            item.add_marker(RUN_AGAIN)
        if "pools" in fixtures:
            item.add_marker(pytest.mark.xdist_group("pools"))
        if item.get_closest_marker("mostly_slow"):
            test = item.path, item.originalname
            if cases[test] % 4:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture
def two_layers() -> TwoLayers:
    from tests.models import TwoLayers

    return TwoLayers()


@pytest.fixture
def loader() -> DataLoader:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """Makes a quiet trainer on the CPU; keyword arguments as Trainer's."""
    from lightning.pytorch import Trainer

    def make(**settings: Any) -> Trainer:
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": tmp_path,
        }
        return Trainer(**{**defaults, **settings})

    return make


@pytest.fixture
def stack() -> Stack:
    from tests.models import Stack

    return Stack()


@pytest.fixture
def moves() -> Callable[..., list[float]]:
    """Tells how far SGD at the rate 1 moves a weight in each step, for a gradient of 1."""
    import torch
    from torch import nn

    import gradpolicy as gp

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
    import torch

    return torch.arange(24).reshape(4, 6) % 6
