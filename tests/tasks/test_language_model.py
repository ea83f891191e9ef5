"""The language model learns, and logs its loss in nats and in bits."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer

from gradpolicy.tasks import CharacterTransformer, LanguageModel
from gradpolicy.tasks.loading import DataModule
from gradpolicy.tasks.tiny_shakespeare import Windows


class Counting(DataModule):
    """A text in which each character follows from the one before."""

    def setup(self, stage: str | None = None) -> None:
        tokens = torch.arange(600) % 7
        self.train_set = self.validation_set = self.test_set = Windows(tokens, 8, 8)


def test_it_learns_a_text_that_follows_a_rule(make_trainer: Callable[..., Trainer]) -> None:
    model = CharacterTransformer(vocabulary=7, context=8, width=16, layers=1, heads=2, dropout=0.0)
    module = LanguageModel(model, partial(torch.optim.AdamW, lr=0.02))
    trainer, data = make_trainer(max_epochs=8), Counting(batch_size=16)
    before = trainer.test(module, data, verbose=False)[0]["test/loss"]
    trainer.fit(module, data)
    logged = trainer.test(module, data, verbose=False)[0]
    assert before == pytest.approx(math.log(7), abs=0.2)
    assert logged["test/loss"] < 0.1
    assert logged["test/bits_per_character"] == pytest.approx(logged["test/loss"] / math.log(2), rel=1e-5)
