"""A job of a sweep that does not log what the sweep compares ends after its first epoch."""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from gradpolicy.errors import PolicyError
from gradpolicy.insight.required_metric import RequiredMetric


def after_an_epoch(name: str) -> None:
    trainer: Any = SimpleNamespace(
        callback_metrics={"val/loss": 1.0, "val/accuracy": 0.5},
        checkpoint_callbacks=[ModelCheckpoint(monitor="val/accuracy"), ModelCheckpoint()],
    )
    model: Any = None
    RequiredMetric(name).on_train_epoch_end(trainer, model)


@pytest.mark.parametrize("name", ["val/loss", "val/accuracy_best", "test/loss", "policy/a/active_share"])
def test_what_is_logged_or_may_be_later_is_no_error(name: str) -> None:
    after_an_epoch(name)


@pytest.mark.parametrize("name", ["val/acuracy_best", "val/loss_best"])
def test_what_is_not_logged_is_an_error_with_the_nearest_names(name: str) -> None:
    with pytest.raises(PolicyError, match=f"optimized_metric: '{name}' is not logged; did you mean"):
        after_an_epoch(name)
