"""Tasks make their optimizers, and log the values of their models."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.functional import cross_entropy

from gradpolicy.tasks import (
    CharacterTransformer,
    Classifier,
    DigitsDataModule,
    LanguageModel,
    QuantizedConvNet,
)
from gradpolicy.tasks.data_sets import Windows
from gradpolicy.tasks.loading import DataModule

sgd = partial(torch.optim.SGD, lr=0.1)


def classifier(**settings: object) -> Classifier:
    return Classifier(QuantizedConvNet(width=2), sgd, **settings)


def test_the_scheduler_steps_at_its_interval(make_trainer: Callable[..., Trainer]) -> None:
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    rates = {}
    for interval in ("step", "epoch"):
        trainer = make_trainer(limit_train_batches=3, limit_val_batches=0)
        trainer.fit(classifier(scheduler=halve, scheduler_interval=interval), DigitsDataModule())
        rates[interval] = trainer.optimizers[0].param_groups[0]["lr"]
    assert rates == {"step": pytest.approx(0.1 / 8), "epoch": pytest.approx(0.1 / 2)}


def test_a_classifier_logs_losses_and_accuracies_of_head_and_probe(
    make_trainer: Callable[..., Trainer],
) -> None:
    module, data = classifier(), DigitsDataModule(batch_size=100)
    logged = make_trainer().test(module, data, verbose=False)[0]
    images, labels = data.test_set.tensors
    output = module.eval()(images)
    losses = cross_entropy(output.logits, labels), cross_entropy(output.probe_logits, labels)
    assert logged == pytest.approx(
        {
            "test/loss": losses[0].item(),
            "test/probe_loss": losses[1].item(),
            "test/accuracy": (output.logits.argmax(1) == labels).float().mean().item(),
            "test/probe_accuracy": (output.probe_logits.argmax(1) == labels).float().mean().item(),
        },
        rel=1e-5,
    )
    torch.testing.assert_close(module.assess((images, labels))[0], losses[0] + losses[1])


def test_a_model_without_a_probe_logs_none(make_trainer: Callable[..., Trainer]) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    logged = make_trainer().test(Classifier(plain, sgd), DigitsDataModule(batch_size=200), verbose=False)[0]
    assert set(logged) == {"test/loss", "test/accuracy"}


class Counting(DataModule):
    """A text in which each character follows from the one before."""

    def setup(self, stage: str | None = None) -> None:
        tokens = torch.arange(600) % 7
        self.train_set = self.validation_set = self.test_set = Windows(tokens, 8)


def test_a_language_model_learns_a_text_that_follows_a_rule(make_trainer: Callable[..., Trainer]) -> None:
    model = CharacterTransformer(vocabulary=7, context=8, width=16, layers=1, heads=2, dropout=0.0)
    module = LanguageModel(model, partial(torch.optim.AdamW, lr=0.02))
    trainer, data = make_trainer(max_epochs=8), Counting(batch_size=16)
    before = trainer.test(module, data, verbose=False)[0]["test/loss"]
    trainer.fit(module, data)
    logged = trainer.test(module, data, verbose=False)[0]
    assert before == pytest.approx(math.log(7), abs=0.2)
    assert logged["test/loss"] < 0.1
    assert logged["test/bits_per_character"] == pytest.approx(logged["test/loss"] / math.log(2), rel=1e-5)
