"""Processes joined by a process group, and training with callbacks."""

from collections.abc import Callable

import pytest
from deepspeed_ranks import gpu, ranks
from lightning.pytorch import Trainer
from pool_fixtures import pair

import gradpolicy as gp

__all__ = ["gpu", "pair", "ranks", "train"]


@pytest.fixture
def train(two_layers, loader, make_trainer) -> Callable[..., Trainer]:
    """Trains `two_layers`, or another module, and returns the trainer."""

    def run(*callbacks, module=two_layers, resume=None, **settings) -> Trainer:
        """Of the callbacks, a dict is that of policies; other keyword arguments as Trainer's."""
        made = [gp.GradientPolicies(each) if isinstance(each, dict) else each for each in callbacks]
        trainer = make_trainer(callbacks=made, **settings)
        trainer.fit(module, loader, ckpt_path=resume, weights_only=True)
        return trainer

    return run
