"""Limits of batches are checked when the data is there, before anything is trained."""

from collections.abc import Callable, Iterator

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from gradpolicy.errors import PolicyError
from gradpolicy.lightning.batch_limits import BatchLimits, check_batches
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


class Loaded(LightningDataModule):
    """Trains with what it is given."""

    def __init__(self, loader: object) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> object:
        return self.loader


class Validated(Loaded):
    """Validates with it too."""

    def val_dataloader(self) -> object:
        return self.loader


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.zeros(1)


def test_a_share_of_a_single_batch_is_refused_and_one_of_no_data_left_to_lightning() -> None:
    half = trainer(limit_train_batches=0.5)
    with pytest.raises(PolicyError, match="of 1 batches that is none"):
        check_batches(half, Loaded(DataLoader(torch.zeros(1))))
    check_batches(half, Loaded(DataLoader([])))


@pytest.mark.parametrize(
    "loader", [DataLoader(Endless()), iter([torch.zeros(1)]), [DataLoader(torch.zeros(1))] * 2]
)
def test_what_has_no_length_of_its_own_has_no_limits(loader: object) -> None:
    check_batches(trainer(limit_train_batches=0.1, val_check_interval=1000), Loaded(loader))


def test_the_limits_of_a_run_are_checked_as_it_begins_to_train(
    two_layers: LightningModule, loader: DataLoader, make_trainer: Callable[..., Trainer]
) -> None:
    def run() -> Trainer:
        return make_trainer(val_check_interval=1000, callbacks=[BatchLimits()])

    data = Validated(loader)
    with pytest.raises(PolicyError, match=r"^trainer\.val_check_interval: 1000 given"):
        run().fit(two_layers, datamodule=data)
    run().validate(two_layers, datamodule=data, verbose=False)


def test_data_that_comes_without_a_module_is_left_to_lightning(
    two_layers: LightningModule, loader: DataLoader, make_trainer: Callable[..., Trainer]
) -> None:
    trainer = make_trainer(callbacks=[BatchLimits()])
    trainer.fit(two_layers, loader)
    assert trainer.global_step == 4
