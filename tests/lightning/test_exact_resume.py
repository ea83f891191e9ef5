"""A run resumed from any of its checkpoints ends with the bits of the run left alone."""

import csv
import random
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only
from torchmetrics import MeanMetric

from gradpolicy.errors import PolicyError
from gradpolicy.lightning.exact_resume import ExactResume, random_states, set_random_states
from gradpolicy.tasks.loading import DataModule, TensorRows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class NoisyRegression(LightningModule):
    """Draws from every global random state and logs in every way, so that each of them matters."""

    def __init__(self, schedule: str = "step") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.mean, self.validation_mean = MeanMetric(), MeanMetric()
        self.schedule = schedule

    def on_fit_start(self) -> None:
        torch.manual_seed(self.global_rank)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        noise = random.random() + np.random.rand() + torch.rand(())
        loss = (self.net(batch[0])[:, 0] - batch[1] - noise).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.mean(loss.detach())
        self.log("train/mean", self.mean, on_step=False, on_epoch=True)
        if self.current_epoch == 0:
            self.log("train/first_epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        loss = (self.net(batch[0])[:, 0] - batch[1]).square().mean()
        self.log("loss", loss + random.random(), sync_dist=True)
        self.validation_mean(loss)
        self.log("validation_mean", self.validation_mean)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if self.schedule == "plateau":
            scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}
        scheduler = {"scheduler": StepLR(optimizer, 1, 0.9), "interval": self.schedule}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Numbers(DataModule):
    """Twenty-two samples: five batches of four, and two samples too many."""

    def setup(self, stage: str | None = None) -> None:
        values = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
        self.train_set = TensorRows(values[:22], values[:22].sum(dim=1))
        self.validation_set = TensorRows(values[22:], values[22:].sum(dim=1))


class OwnDraws:
    """A loader of a person's own, whose state is another one on each process."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        self.given = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.given %= len(self)
        while self.given < len(self):
            values = torch.randn(4, 3, generator=self.generator)
            self.given += 1
            yield values, values.sum(dim=1)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.given = state["given"]


class DrawnNumbers(Numbers):
    """Each process draws batches of its own."""

    def train_dataloader(self) -> OwnDraws:
        return OwnDraws()


class SaveEverywhere(Checkpoint):
    """Writes a checkpoint wherever a run may end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, trainer: Trainer, moment: str) -> None:
        if not trainer.sanity_checking:
            batch = trainer.fit_loop.epoch_loop.batch_idx
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}_{batch}_{moment}.ckpt")

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *batch: Any) -> None:
        self.save(trainer, "0_batch")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.save(trainer, "1_validation")

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.save(trainer, "2_epoch")


class Seen(Callback):
    """Remembers a run's batches, and what it would draw next at its end."""

    def __init__(self) -> None:
        self.events: list[list[float]] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *batch: Any) -> None:
        self.events.append(batch[0][1].tolist())

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.events.append([random.random(), np.random.rand(), torch.rand(()).item()])


class SaveAtTheEnd(Callback):
    """Writes a checkpoint when nothing is left to train."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def fit(
    folder: Path,
    resume_from: Path | None = None,
    exact: bool = True,
    data: DataModule | None = None,
    schedule: str = "step",
    patience: int | None = None,
    version: int | None = None,
    more: Sequence[Callback] = (),
    **settings: Any,
) -> list[Any]:
    """Trains for three epochs, saving everywhere; gives what it saw, and the metrics at its end."""
    random.seed(3 if resume_from is None else 4)
    np.random.seed(3 if resume_from is None else 4)
    seen = Seen()
    callbacks: list[Callback] = [*more, seen, *[ExactResume()] * exact, SaveEverywhere(folder)]
    if patience is not None:
        callbacks.append(EarlyStopping("loss", patience=patience, min_delta=100))
    quiet = ("enable_progress_bar", "enable_model_summary")
    defaults = {"max_epochs": 3, "accelerator": "cpu", "log_every_n_steps": 1, **dict.fromkeys(quiet, False)}
    logger = CSVLogger(folder, name="log", version=version)
    trainer = Trainer(callbacks=callbacks, **{"logger": logger, **defaults, **settings})
    trainer.fit(
        NoisyRegression(schedule),
        data or Numbers(batch_size=4, seed=5),
        ckpt_path=resume_from,
        weights_only=True if resume_from else None,
    )
    return [*seen.events, {name: float(value) for name, value in trainer.callback_metrics.items()}]


def content(checkpoint: Path) -> list[tuple[str, Any]]:
    """Everything that is in a checkpoint, but for the place of the log."""
    leaves, _ = tree_flatten_with_path(torch.load(checkpoint, weights_only=True))
    plain = tree_map_only(Tensor, lambda tensor: (tensor.dtype, tensor.tolist()), leaves)
    return [(keystr(place), leaf) for place, leaf in plain if not keystr(place).endswith("['path']")]


def log(folder: Path) -> list[dict[str, str]]:
    """The rows of a run's log."""
    with (folder / "log" / "version_0" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def departures(folder: Path, checkpoints: str = "*", **settings: Any) -> tuple[list[str], int]:
    """The checkpoints from which a resumed run departs from the undisturbed one, and how many were tried.

    The batches that it sees, its metrics, every later checkpoint and the log must be the same.
    """
    whole = folder / "whole"
    events = fit(whole, **settings)
    saved = sorted(whole.glob("*.ckpt"))
    tried = sorted(whole.glob(f"{checkpoints}.ckpt"))

    def same(checkpoint: Path) -> bool:
        resumed = folder / checkpoint.stem
        rest = fit(resumed, checkpoint, **settings)
        later = [path.name for path in saved if path > checkpoint]
        return (
            rest == events[len(events) - len(rest) :]
            and sorted(path.name for path in resumed.glob("*.ckpt")) == later
            and all(content(resumed / name) == content(whole / name) for name in later)
            and log(resumed) == log(whole)
        )

    return [checkpoint.stem for checkpoint in tried if not same(checkpoint)], len(tried)


@contextmanager
def no_warning(words: str) -> Iterator[None]:
    """Raises such a warning; a mark would count for less than the marks of the whole file."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", words)
        yield


def test_resuming_from_any_moment_gives_the_same_bits_and_the_same_log(tmp_path: Path) -> None:
    with no_warning("The ``compute`` method .* was called before"):
        assert departures(tmp_path, "1_*") == ([], 5 + 2)


@pytest.mark.slow
def test_resuming_inside_an_epoch_keeps_windows_validation_and_schedulers(tmp_path: Path) -> None:
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 2, "schedule": "plateau"}
    assert departures(tmp_path, "1_*", **settings) == ([], 5 + 2 + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_resuming_on_a_gpu_gives_the_same_bits(tmp_path: Path) -> None:
    assert departures(tmp_path, "1_*", accelerator="gpu") == ([], 5 + 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "checkpoints"),
    [
        ({}, 21),
        ({"schedule": "epoch"}, 21),
        ({"schedule": "plateau"}, 21),
        ({"check_val_every_n_epoch": 2}, 15 + 3 + 1),
        ({"check_val_every_n_epoch": None, "val_check_interval": 3}, 15 + 3 + 5),
        ({"limit_val_batches": 0}, 15 + 3),
        ({"limit_train_batches": 3}, 9 + 6),
        ({"max_epochs": -1, "max_steps": 12}, 12 + 2 + 3),
        ({"reload_dataloaders_every_n_epochs": 1}, 21),
    ],
)
def test_whatever_the_loops_are_told(tmp_path: Path, settings: dict[str, Any], checkpoints: int) -> None:
    assert departures(tmp_path, **settings) == ([], checkpoints)


@pytest.mark.slow
def test_resuming_with_loader_workers_gives_the_same_bits(tmp_path: Path) -> None:
    data = Numbers(batch_size=4, seed=5, workers=2)
    assert departures(tmp_path, "1_[14]_*", data=data) == ([], 4)


@pytest.mark.parametrize(
    ("checkpoints", "settings", "tried"),
    [
        ("1_*", {"max_epochs": -1, "max_steps": 7, "log_every_n_steps": 2}, 3),
        ("1_[34]_*", {"max_epochs": -1, "max_steps": 10}, 4),
    ],
)
def test_a_limit_of_steps_is_kept(
    tmp_path: Path, checkpoints: str, settings: dict[str, Any], tried: int
) -> None:
    assert departures(tmp_path, checkpoints, **settings) == ([], tried)


def test_a_scheduler_that_watches_the_validation_steps_once_an_epoch(tmp_path: Path) -> None:
    assert departures(tmp_path, "0_4_*", schedule="plateau", max_epochs=2) == ([], 3)


def test_a_run_that_early_stopping_ended_stays_ended(tmp_path: Path) -> None:
    assert departures(tmp_path, "1_4_*", patience=1) == ([], 3)


def test_it_goes_on_if_its_patience_has_been_raised(tmp_path: Path) -> None:
    fit(tmp_path / "whole", patience=1)
    fit(tmp_path / "longer", tmp_path / "whole" / "1_4_2_epoch.ckpt", patience=3)
    assert (tmp_path / "longer" / "2_4_2_epoch.ckpt").is_file()


def test_without_the_callback_a_resumed_run_departs(tmp_path: Path) -> None:
    assert len(departures(tmp_path, "1_[03]_0_batch", exact=False)[0]) == 2


def test_a_run_that_has_ended_goes_on_for_more_epochs(tmp_path: Path) -> None:
    whole, short, longer = tmp_path / "whole", tmp_path / "short", tmp_path / "longer"
    events = fit(whole)
    fit(short, max_epochs=1, more=[SaveAtTheEnd(short / "end.pt")])
    assert fit(longer, short / "end.pt") == events[5:]
    assert content(longer / "2_4_2_epoch.ckpt") == content(whole / "2_4_2_epoch.ckpt")
    assert log(longer) == log(whole)


def test_a_checkpoint_that_was_only_validated_does_not_begin_the_next_run(
    make_trainer, tmp_path: Path
) -> None:
    events = fit(tmp_path / "whole", max_epochs=1)
    seen = Seen()
    trainer = make_trainer(callbacks=[seen, ExactResume()])
    model, data = NoisyRegression(), Numbers(batch_size=4, seed=5)
    trainer.validate(model, data, ckpt_path=tmp_path / "whole" / "0_2_0_batch.ckpt", weights_only=True)
    trainer.fit(model, data)
    assert seen.events[:5] == events[:5]


def test_another_number_of_processes_goes_on_with_a_warning(tmp_path: Path) -> None:
    events = fit(tmp_path / "whole")
    of_two = tmp_path / "of_two.ckpt"
    saved = torch.load(tmp_path / "whole" / "1_2_0_batch.ckpt", weights_only=True)
    saved[ExactResume.KEY].append({})
    torch.save(saved, of_two)
    with pytest.warns(UserWarning, match=r"is of 2 process\(es\), resumed by 1: random states start anew"):
        rest = fit(tmp_path / "resumed", of_two)
    assert rest[:-2] == events[8:-2]
    assert rest[-2:] != events[-2:]
    assert [row["step"] for row in log(tmp_path / "resumed")] == [
        row["step"] for row in log(tmp_path / "whole")
    ]


def test_a_log_that_the_logger_itself_deletes_is_told_of(tmp_path: Path) -> None:
    fit(tmp_path, version=0, max_epochs=1)
    rows = log(tmp_path)
    with pytest.warns(UserWarning, match="begins at the resumed step.*leave version= out"):
        fit(tmp_path, tmp_path / "0_4_2_epoch.ckpt", version=0, max_epochs=2)
    assert log(tmp_path)[0]["step"] != rows[0]["step"]


def test_a_log_that_is_gone_is_told_of(tmp_path: Path) -> None:
    fit(tmp_path / "whole", max_epochs=1)
    rows = log(tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole" / "log")
    with pytest.warns(UserWarning, match=r"begins at the resumed step: .*metrics\.csv, .*, is gone"):
        fit(tmp_path / "resumed", tmp_path / "whole" / "0_2_0_batch.ckpt", max_epochs=1)
    assert log(tmp_path / "resumed") == rows[2:]


def test_a_log_that_had_not_begun_is_not_missed(tmp_path: Path) -> None:
    settings = {"max_epochs": 1, "log_every_n_steps": 100}
    fit(tmp_path / "whole", **settings)
    rows = log(tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole" / "log")
    with no_warning(".*begins at the resumed step"):
        fit(tmp_path / "resumed", tmp_path / "whole" / "0_2_0_batch.ckpt", **settings)
    assert log(tmp_path / "resumed") == rows


@pytest.mark.parametrize("before", [True, False])
def test_a_log_may_be_left_out_on_either_side(tmp_path: Path, before: bool) -> None:
    logs = {"logger": False}
    events = fit(tmp_path / "whole", max_epochs=1, **({} if before else logs))
    checkpoint = tmp_path / "whole" / "0_2_0_batch.ckpt"
    assert fit(tmp_path / "resumed", checkpoint, max_epochs=1, **(logs if before else {})) == events[3:]
    assert (tmp_path / "resumed" / "log").is_dir() != before


def test_a_run_of_a_gpu_can_go_on_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*arguments: object) -> None:
        raise AssertionError("there is no GPU")

    monkeypatch.setattr(torch.cuda, "set_rng_state", lacking)
    cpu = torch.device("cpu")
    states = {**random_states(cpu), "cuda": torch.get_rng_state()}
    drawn = random.random(), np.random.rand(), torch.rand(())
    set_random_states(states, cpu)
    assert (random.random(), np.random.rand(), torch.rand(())) == drawn


def test_a_trainer_that_goes_on_itself_keeps_its_log(make_trainer, tmp_path: Path) -> None:
    model, data = NoisyRegression(), Numbers(batch_size=4, seed=5)
    logger = CSVLogger(tmp_path, name="log")
    trainer = make_trainer(log_every_n_steps=1, logger=logger, callbacks=[ExactResume()])
    trainer.fit(model, data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    rows = log(tmp_path)
    trainer.fit_loop.max_epochs = 2
    with no_warning(".*begins at the resumed step"):
        trainer.fit(model, data, ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert log(tmp_path)[: len(rows)] == rows
    assert [row["step"] for row in log(tmp_path)[len(rows) :]] == ["5", "6", "7", "8", "9", "9", "9"]


def test_resuming_on_two_processes_gives_the_same_bits(tmp_path: Path) -> None:
    settings = {"strategy": "ddp_fork", "devices": 2, "accumulate_grad_batches": 2}

    def run(folder: str, resume_from: Path | None = None) -> list[Any]:
        fit(tmp_path / folder, resume_from, data=Numbers(batch_size=2, seed=5), **settings)
        return [content(tmp_path / folder / "2_4_2_epoch.ckpt"), log(tmp_path / folder)]

    whole = run("whole")
    assert run("within_a_window", tmp_path / "whole" / "1_2_0_batch.ckpt") == whole
    assert run("end_of_an_epoch", tmp_path / "whole" / "1_4_0_batch.ckpt") == whole


def test_every_process_resumes_a_loader_of_its_own(tmp_path: Path) -> None:
    def run(folder: str, resume_from: Path | None = None) -> list[Any]:
        data = DrawnNumbers(batch_size=2, seed=5)
        fit(tmp_path / folder, resume_from, data=data, strategy="ddp_fork", devices=2)
        return content(tmp_path / folder / "2_4_2_epoch.ckpt")

    whole = run("whole")
    assert run("resumed", tmp_path / "whole" / "1_2_0_batch.ckpt") == whole


def test_resuming_inside_an_epoch_with_another_batch_size_is_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(PolicyError, match="batch_size=4, here it is 2"):
        fit(tmp_path, tmp_path / "1_2_0_batch.ckpt", data=Numbers(batch_size=2, seed=5))
