"""Processes joined by a process group, the programs beside the tests, and training under callbacks."""

from collections.abc import Callable

import pytest
from lightning.pytorch import Trainer
from pool_fixtures import pair

__all__ = ["pair"]


@pytest.fixture
def fit(two_layers, loader, make_trainer) -> Callable[..., Trainer]:
    """Trains under callbacks, and gives the trainer."""

    def run(*callbacks, model=two_layers, ckpt_path=None, **settings) -> Trainer:
        trainer = make_trainer(callbacks=list(callbacks), **settings)
        trainer.fit(model, loader, ckpt_path=ckpt_path, weights_only=True)
        return trainer

    return run
