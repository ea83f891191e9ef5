"""A metric that a run will not log is known before it trains."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from gradpolicy.insight.logged_metrics import logged_metrics, missing_metric


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(4, 2))

    val_dataloader = test_dataloader = train_dataloader


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.layer(batch).sum()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log_dict({"val/loss": 0.0, "val/accuracy": 1.0}, on_epoch=True)

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("test/loss", 0.0)


class LogsMore(Model):
    def on_validation_epoch_end(self) -> None:
        self.log("val/f1", 1.0)


class AsksTrainer(Model):
    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        return self.trainer.max_steps


class Mine(Callback):
    """A callback of the user's own, which may log anything."""


BEST = ModelCheckpoint(monitor="val/accuracy")


def test_the_names_are_those_of_every_step_and_the_model_is_left_alone() -> None:
    model, state = Model(), torch.get_rng_state()
    assert logged_metrics(model, Data()) == {
        *("train/loss", "val/loss", "val/accuracy", "test/loss"),
    }
    assert "log" not in vars(model)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "name", ["val/accuracy", "val/accuracy_best", "train/loss_epoch", "test/loss", "policy/a/active_share"]
)
def test_nothing_is_said_of_what_will_be_logged(name: str) -> None:
    assert missing_metric(name, Model(), Data(), [BEST]) == ("", False)


def test_a_misspelt_metric_is_told_with_the_nearest_that_are_logged() -> None:
    message, certain = missing_metric("val/acuracy_best", Model(), Data(), [BEST])
    assert message.startswith(
        "optimized_metric: 'val/acuracy_best' is not logged; did you mean 'val/accuracy_best'"
    )
    assert certain
    assert missing_metric("val/loss_best", Model(), Data(), [BEST])[0]


@pytest.mark.parametrize(("model", "callbacks"), [(LogsMore(), [BEST]), (Model(), [BEST, Mine()])])
def test_where_hooks_or_callbacks_may_log_it_that_is_not_certain(
    model: LightningModule, callbacks: list[Callback]
) -> None:
    message, certain = missing_metric("val/f1", model, Data(), callbacks)
    assert message
    assert not certain


def test_nothing_is_known_of_a_step_that_needs_a_trainer() -> None:
    assert missing_metric("val/f1", AsksTrainer(), Data(), []) == ("", False)
