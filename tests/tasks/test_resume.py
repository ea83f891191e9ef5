"""A run resumed from any of its checkpoints ends with the bits of the run left alone."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.loading import DataModule, TensorRows
from gradpolicy.tasks.resume import ExactResume

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class NoisyRegression(LightningModule):
    """Draws from every global random state, so that each of them matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def on_fit_start(self) -> None:
        torch.manual_seed(self.global_rank)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        noise = random.random() + np.random.rand() + torch.rand(())
        return (self.net(batch[0])[:, 0] - batch[1] - noise).square().mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("loss", (self.net(batch[0])[:, 0] - batch[1]).square().mean())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Numbers(DataModule):
    """Twenty-two samples: five batches of four, and two samples too many."""

    def setup(self, stage: str | None = None) -> None:
        values = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
        self.train_set = TensorRows(values[:22], values[:22].sum(dim=1))
        self.validation_set = TensorRows(values[22:], values[22:].sum(dim=1))


class SaveEverywhere(Callback):
    """Writes a checkpoint wherever a run may end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batch = 0

    def save(self, trainer: Trainer, moment: str) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}_{self.batch}_{moment}.ckpt")

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *batch: Any) -> None:
        self.batch = batch[-1]
        self.save(trainer, "batch")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.save(trainer, "epoch")


class Seen(Callback):
    """Remembers a run's batches, and what it would draw next at its end."""

    def __init__(self) -> None:
        self.events: list[list[float]] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *batch: Any) -> None:
        self.events.append(batch[0][1].tolist())

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.events.append([random.random(), np.random.rand(), torch.rand(()).item()])


def fit(
    folder: Path,
    resume_from: Path | None = None,
    exact: bool = True,
    save: bool = False,
    data: DataModule | None = None,
    **settings: Any,
) -> tuple[Trainer, list[list[float]]]:
    """Trains for three epochs; gives the trainer and what it saw."""
    random.seed(3 if resume_from is None else 4)
    np.random.seed(3 if resume_from is None else 4)
    seen = Seen()
    callbacks: list[Callback] = [seen] + [ExactResume()] * exact
    if resume_from is None or save:
        callbacks.append(SaveEverywhere(folder))
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = {**dict.fromkeys(quiet, False), "max_epochs": 3, "accelerator": "cpu", **settings}
    trainer = Trainer(callbacks=callbacks, **settings)
    data = data or Numbers(batch_size=4, seed=5)
    trainer.fit(NoisyRegression(), data, ckpt_path=resume_from, weights_only=True if resume_from else None)
    return trainer, seen.events


def final_state(trainer: Trainer) -> list[Tensor]:
    """Weights, moments, learning rates and counters."""
    moments = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    rates = [torch.tensor(group["lr"]) for group in trainer.optimizers[0].param_groups]
    counters = torch.tensor([trainer.global_step, trainer.current_epoch])
    return [*trainer.lightning_module.state_dict().values(), *moments, *rates, counters]


def departures(folder: Path, checkpoints: str = "*", **settings: Any) -> tuple[list[str], int]:
    """The checkpoints from which a resumed run departs from the undisturbed one, and how many were tried."""
    trainer, events = fit(folder, **settings)
    state = final_state(trainer)
    tried = sorted(folder.glob(f"{checkpoints}.ckpt"))

    def same(checkpoint: Path) -> bool:
        resumed, rest = fit(folder, checkpoint, **settings)
        equal = all(torch.equal(*pair) for pair in zip(final_state(resumed), state, strict=True))
        return equal and rest == events[len(events) - len(rest) :]

    return [checkpoint.stem for checkpoint in tried if not same(checkpoint)], len(tried)


def test_resuming_from_any_moment_gives_the_same_bits(tmp_path: Path) -> None:
    assert departures(tmp_path) == ([], 3 * (5 + 2))


def test_resuming_within_an_accumulation_window_gives_the_same_bits(tmp_path: Path) -> None:
    assert departures(tmp_path, accumulate_grad_batches=2) == ([], 3 * (5 + 2))


def test_resuming_with_validation_inside_the_epoch_gives_the_same_bits(tmp_path: Path) -> None:
    assert departures(tmp_path, val_check_interval=2) == ([], 3 * (5 + 2 + 1))


def test_resuming_with_loader_workers_gives_the_same_bits(tmp_path: Path) -> None:
    data = Numbers(batch_size=4, seed=5, workers=2)
    assert departures(tmp_path, "1_[14]_*", data=data) == ([], 4)


def test_without_the_callback_a_resumed_run_departs(tmp_path: Path) -> None:
    assert len(departures(tmp_path, "1_*_batch", exact=False)[0]) == 5


def test_resuming_on_two_processes_gives_the_same_bits(tmp_path: Path) -> None:
    def run(folder: str, resume_from: Path | None = None) -> dict[str, Any]:
        (tmp_path / folder).mkdir()
        settings = {"strategy": "ddp_fork", "devices": 2, "accumulate_grad_batches": 2}
        fit(tmp_path / folder, resume_from, data=Numbers(batch_size=2, seed=5), save=True, **settings)
        return torch.load(tmp_path / folder / "2_4_epoch.ckpt", weights_only=True)

    whole = run("whole")
    within_a_window = run("resumed", tmp_path / "whole" / "1_2_batch.ckpt")
    leaves = zip(tree_leaves(within_a_window), tree_leaves(whole), strict=True)
    assert all(bool(torch.as_tensor(ours == theirs).all()) for ours, theirs in leaves)


def test_resuming_inside_an_epoch_with_another_batch_size_is_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(PolicyError, match="batch_size=4, here it is 2"):
        fit(tmp_path, tmp_path / "1_2_batch.ckpt", data=Numbers(batch_size=2, seed=5))
