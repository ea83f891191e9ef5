"""A checkpoint records in which hook it was written."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from gradpolicy.lightning.resume_point import BATCH, ELSEWHERE, EPOCH, VALIDATION, moment

HOOKS = (
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
ENDS = {"on_train_batch_end": BATCH, "on_validation_end": VALIDATION, "on_train_epoch_end": EPOCH}


class Points(Callback):
    """Notes the points that are told in each hook."""

    def __init__(self) -> None:
        self.told: dict[str, set[str]] = {}
        for name in HOOKS:
            setattr(self, name, self.noting(name))

    def noting(self, name: str) -> Callable[..., None]:
        def note(trainer: Trainer, *arguments: Any) -> None:
            self.told.setdefault(name, set()).add(moment(trainer))

        return note


@pytest.fixture
def points() -> Points:
    return Points()


def test_only_an_end_from_which_the_loops_go_on_is_told(two_layers, loader, make_trainer, points) -> None:
    make_trainer(max_epochs=2, callbacks=[points]).fit(two_layers, loader, loader)
    expected = {name: {ENDS.get(name, ELSEWHERE)} for name in HOOKS if name != "on_sanity_check_start"}
    assert points.told == expected


def test_no_other_validation_is_one_of_the_run(two_layers, loader, make_trainer, points) -> None:
    trainer = make_trainer(num_sanity_val_steps=2, callbacks=[points])
    trainer.fit(two_layers, loader, loader)
    assert points.told["on_sanity_check_start"] == {ELSEWHERE}
    assert points.told["on_validation_end"] == {ELSEWHERE, VALIDATION}
    points.told.clear()
    trainer.validate(two_layers, loader, verbose=False)
    assert points.told["on_validation_end"] == {ELSEWHERE}
