"""Limits of batches are checked when the data is there, before anything is trained."""

import pytest
from lightning.pytorch import Trainer

from gradpolicy.errors import PolicyError
from gradpolicy.lightning.batch_limits import check_batches
from gradpolicy.tasks import DigitsDataModule


@pytest.fixture
def data() -> DigitsDataModule:
    """Digits: 19 batches of training, three of validation."""
    made = DigitsDataModule(batch_size=64)
    made.setup("fit")
    return made


def trainer(**settings: object) -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **settings)  # type: ignore[arg-type]


def test_an_interval_longer_than_an_epoch_is_refused(data: DigitsDataModule) -> None:
    batches = len(data.train_dataloader())
    check_batches(trainer(val_check_interval=batches), data)
    with pytest.raises(
        PolicyError, match=rf"^trainer\.val_check_interval: .* an epoch has {batches} batches"
    ):
        check_batches(trainer(val_check_interval=batches + 1), data)


@pytest.mark.parametrize("settings", [{"check_val_every_n_epoch": None}, {"limit_val_batches": 0}])
def test_it_may_be_longer_where_it_counts_on_or_nothing_is_validated(
    data: DigitsDataModule, settings: dict
) -> None:
    check_batches(trainer(val_check_interval=1000, **settings), data)


@pytest.mark.parametrize("name", ["limit_train_batches", "limit_val_batches"])
def test_a_share_that_comes_to_no_batch_is_refused(data: DigitsDataModule, name: str) -> None:
    with pytest.raises(PolicyError, match=rf"^trainer\.{name}: 0\.01 given"):
        check_batches(trainer(**{name: 0.01}), data)
