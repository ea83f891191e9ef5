"""A task makes its optimizer and its scheduler."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer

from gradpolicy.errors import PolicyError
from gradpolicy.tasks import Classifier, DigitsDataModule, QuantizedConvNet
from gradpolicy.tasks.task import Task


def task(**settings: object) -> Task:
    return Classifier(QuantizedConvNet(width=2), partial(torch.optim.SGD, lr=0.1), **settings)


def test_the_scheduler_steps_when_told(make_trainer: Callable[..., Trainer]) -> None:
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    rates = {}
    for interval in ("step", "epoch"):
        trainer = make_trainer(limit_train_batches=3, limit_val_batches=0)
        trainer.fit(task(scheduler=halve, scheduler_interval=interval), DigitsDataModule())
        rates[interval] = trainer.optimizers[0].param_groups[0]["lr"]
    assert rates == {"step": pytest.approx(0.1 / 8), "epoch": pytest.approx(0.1 / 2)}


def test_an_unknown_interval_is_refused() -> None:
    with pytest.raises(PolicyError, match="scheduler_interval: 'minute'"):
        task(scheduler_interval="minute")
