"""The classifier's loss, its logged values and its optimizer are those of its parts."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.functional import cross_entropy

from gradpolicy.tasks import Classifier, DigitsDataModule, QuantizedConvNet

sgd = partial(torch.optim.SGD, lr=0.1)


def classifier(**settings: object) -> Classifier:
    return Classifier(QuantizedConvNet(width=2), sgd, **settings)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_the_loss_is_that_of_the_head_and_that_of_the_probe() -> None:
    module = classifier().eval()
    images, labels = torch.rand(6, 1, 8, 8), torch.arange(6)
    output = module(images)
    expected = cross_entropy(output.logits, labels) + cross_entropy(output.probe_logits, labels)
    torch.testing.assert_close(module.training_step((images, labels), 0), expected)


def test_a_test_run_logs_the_accuracies_of_head_and_probe(make_trainer: Callable[..., Trainer]) -> None:
    module, data = classifier(), DigitsDataModule(batch_size=100)
    logged = make_trainer().test(module, data, verbose=False)[0]
    images, labels = data.test_set.tensors
    output = module.eval()(images)
    assert logged["test/accuracy"] == pytest.approx((output.logits.argmax(1) == labels).float().mean().item())
    assert logged["test/probe_accuracy"] == pytest.approx(
        (output.probe_logits.argmax(1) == labels).float().mean().item()
    )
    assert logged["test/loss"] == pytest.approx(cross_entropy(output.logits, labels).item(), rel=1e-5)


def test_a_fit_logs_training_and_validation_values(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(limit_train_batches=2, limit_val_batches=1)
    trainer.fit(classifier(), DigitsDataModule())
    names = {"loss", "accuracy", "probe_loss", "probe_accuracy"}
    assert set(trainer.callback_metrics) == {
        f"{stage}/{name}" for stage in ("train", "val") for name in names
    }


def test_a_model_without_a_probe_logs_none(make_trainer: Callable[..., Trainer]) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    logged = make_trainer().test(Classifier(plain, sgd), DigitsDataModule(batch_size=200), verbose=False)[0]
    assert set(logged) == {"test/loss", "test/accuracy"}
