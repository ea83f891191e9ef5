"""A run resumed from any of its checkpoints ends with the bits of the run left alone."""

import csv
import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from process_pool import ProcessPool, here
from runs import STRATEGIES
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.loading import DataModule, TensorRows
from gradpolicy.train.lightning.checkpoints import AtomicCheckpointIO, checked_restore
from gradpolicy.train.lightning.resume import ExactResume
from gradpolicy.train.lightning.resumed_files import append_rows
from tests.fixtures import TwoLayers

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
    data: DataModule | None = None,
    schedule: str = "step",
    patience: int | None = None,
    more: Sequence[Callback] = (),
    **settings: Any,
) -> list[Any]:
    """Trains for three epochs, saving everywhere; what it saw, and the metrics at its end."""
    random.seed(3 if resume_from is None else 4)
    np.random.seed(3 if resume_from is None else 4)
    seen = Seen()
    callbacks: list[Callback] = [*more, seen, ExactResume(folder), SaveEverywhere(folder)]
    if patience is not None:
        callbacks.append(EarlyStopping("loss", patience=patience, min_delta=100))
    quiet = ("enable_progress_bar", "enable_model_summary")
    defaults = {"max_epochs": 3, "accelerator": "cpu", "log_every_n_steps": 1, **dict.fromkeys(quiet, False)}
    logger = CSVLogger(folder, name="log", version=0)
    if resume_from is not None and not (dist.is_initialized() and dist.get_rank()):
        append_rows(logger)
    defaults["plugins"] = [AtomicCheckpointIO()]
    trainer = Trainer(callbacks=callbacks, **{"logger": logger, **defaults, **settings})
    given = data or Numbers(batch_size=4, seed=5)
    trainer.fit(NoisyRegression(schedule), given, ckpt_path=resume_from, weights_only=True)
    return [*seen.events, {name: float(value) for name, value in trainer.callback_metrics.items()}]


# Averages over an epoch: those of the interrupted one are over the batches since the resume.
AVERAGES = ("train/loss_epoch", "train/loss", "train/mean", "train/first_epoch")


def plain(numbers: dict[str, Any], averages: bool) -> dict[str, Any]:
    """Metrics, with averages over training epochs or their names alone."""
    return {name: number if averages or name not in AVERAGES else "" for name, number in numbers.items()}


def content(checkpoint: Path, averages: bool = True) -> dict[str, Any]:
    """Everything that is in a checkpoint, perhaps but for what was logged."""
    saved = torch.load(checkpoint, weights_only=True)
    for state in saved[ExactResume.KEY] if not averages else ():
        state["metrics"] = None
        state["position"] |= dict.fromkeys(("row", "averages"))
    return comparable(saved)


def comparable(saved: Any) -> Any:
    """What was saved, with lists for tensors."""
    if isinstance(saved, Tensor):
        return saved.dtype, saved.tolist()
    if isinstance(saved, dict):
        return {key: comparable(value) for key, value in saved.items()}
    return list(map(comparable, saved)) if isinstance(saved, list | tuple) else saved


def log(folder: Path) -> list[dict[str, str]]:
    """The rows of a run's log."""
    with (folder / "log" / "version_0" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def ran(rest: list[Any], averages: bool) -> list[Any]:
    return [*rest[:-1], plain(rest[-1], averages)]


def departures(folder: Path, checkpoints: str = "*", **settings: Any) -> tuple[list[str], int]:
    """The checkpoints from which a resumed run departs from the undisturbed one, and how many were tried.

    The batches that it sees, its metrics, every later checkpoint and the log must be the same. Each is
    resumed in a copy of the whole run, of which what comes after the checkpoint is cut off.
    """
    whole = folder / "whole"
    events = fit(whole, **settings)
    saved = sorted(whole.glob("*.ckpt"))
    tried = sorted(whole.glob(f"{checkpoints}.ckpt"))

    def same(checkpoint: Path) -> bool:
        resumed = shutil.copytree(whole, folder / checkpoint.stem)
        rest = fit(resumed, resumed / checkpoint.name, **settings)
        epoch, batch, _ = checkpoint.stem.split("_", 2)
        averages = batch == max(path.stem.split("_")[1] for path in saved if path.name.startswith(epoch))
        rows = [
            [plain(row, averages or row["epoch"] != epoch) for row in log(place)]
            for place in (resumed, whole)
        ]
        return (
            ran(rest, averages) == ran(events[len(events) - len(rest) :], averages)
            and [path.name for path in sorted(resumed.glob("*.ckpt"))] == [path.name for path in saved]
            and all(
                content(resumed / path.name, averages) == content(path, averages)
                for path in saved
                if path > checkpoint
            )
            and rows[0] == rows[1]
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
        assert departures(tmp_path, "1_[24]_*") == ([], 1 + 3)


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("checkpoints", "settings", "tried"),
    [
        # A limit of steps is kept.
        ("1_*", {"max_epochs": -1, "max_steps": 7, "log_every_n_steps": 2}, 3),
        # A scheduler that watches the validation steps once an epoch.
        ("0_4_1_*", {"schedule": "plateau", "max_epochs": 2}, 1),
        # A run that early stopping ended stays ended.
        ("1_4_*", {"patience": 1}, 3),
        slow("*", {}, 21),
        slow("1_[34]_*", {"max_epochs": -1, "max_steps": 10}, 4),
        slow(
            "1_*", {"accumulate_grad_batches": 2, "val_check_interval": 2, "schedule": "plateau"}, 5 + 2 + 1
        ),
        slow("1_*", {"schedule": "epoch"}, 7),
        slow("1_*", {"schedule": "plateau"}, 7),
        slow("1_*", {"check_val_every_n_epoch": 2}, 5 + 1 + 1),
        slow("1_*", {"check_val_every_n_epoch": None, "val_check_interval": 3}, 5 + 1 + 2),
        slow("1_*", {"limit_val_batches": 0}, 5 + 1),
        slow("1_*", {"limit_train_batches": 3}, 3 + 2),
        slow("1_*", {"max_epochs": -1, "max_steps": 12}, 7),
        slow("1_*", {"reload_dataloaders_every_n_epochs": 1}, 7),
        slow("1_[14]_*", {"data": Numbers(batch_size=4, seed=5, workers=2)}, 4),
        pytest.param("1_*", {"accelerator": "gpu"}, 5 + 2, marks=ON_GPU),
    ],
)
def test_whatever_the_loops_are_told(
    tmp_path: Path, checkpoints: str, settings: dict[str, Any], tried: int
) -> None:
    assert departures(tmp_path, checkpoints, **settings) == ([], tried)


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


def test_resuming_inside_an_epoch_with_another_batch_size_is_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(PolicyError, match=r"'batch_size': 4}, here it is .*'batch_size': 2}"):
        fit(tmp_path, tmp_path / "1_2_0_batch.ckpt", data=Numbers(batch_size=2, seed=5))


def test_a_run_that_has_ended_goes_on_for_more_epochs(tmp_path: Path) -> None:
    whole, short = tmp_path / "whole", tmp_path / "short"
    events = fit(whole)
    fit(short, max_epochs=1, more=[SaveAtTheEnd(short / "end.pt")])
    assert fit(short, short / "end.pt") == events[5:]
    assert content(short / "2_4_2_epoch.ckpt") == content(whole / "2_4_2_epoch.ckpt")
    assert log(short) == log(whole)


def test_another_number_of_processes_goes_on_with_a_warning(tmp_path: Path) -> None:
    events = fit(tmp_path)
    saved = torch.load(tmp_path / "1_2_0_batch.ckpt", weights_only=True)
    saved[ExactResume.KEY].append({})
    torch.save(saved, tmp_path / "of_two.ckpt")
    with pytest.warns(UserWarning, match="resumed by 1: random states are re-initialised"):
        rest = fit(tmp_path, tmp_path / "of_two.ckpt")
    assert rest[:-2] == events[8:-2]
    assert rest[-2:] != events[-2:]


def test_rows_that_are_gone_are_told(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    (tmp_path / "log/version_0/metrics.csv").unlink()
    with pytest.warns(UserWarning, match=r"metrics\.csv lacks rows of the steps before the checkpoint"):
        fit(tmp_path, tmp_path / "0_2_0_batch.ckpt", max_epochs=1)


def test_a_run_from_a_checkpoint_elsewhere_is_a_new_one(tmp_path: Path) -> None:
    fit(tmp_path / "former", patience=9)
    before = {path: path.read_bytes() for path in (tmp_path / "former").rglob("*") if path.is_file()}
    stopper = EarlyStopping("loss", patience=9)
    fit(tmp_path / "new", tmp_path / "former" / "1_2_0_batch.ckpt", more=[stopper])
    assert {path: path.read_bytes() for path in before} == before
    assert [row["step"] for row in log(tmp_path / "new")][:2] == ["7", "8"]
    # It has seen two epochs, and not the best of the first.
    saved = torch.load(tmp_path / "former/0_4_2_epoch.ckpt", weights_only=True)
    assert stopper.best_score != saved["callbacks"][stopper.state_key]["best_score"]


def fit_on_ranks(folder: Path, resume_from: Path | None) -> None:
    """Trains under DDP on the ranks of a pool."""
    accelerator = "gpu" if here().type == "cuda" else "cpu"
    settings = {"strategy": STRATEGIES["ddp"](), "devices": 2, "accumulate_grad_batches": 2}
    fit(folder, resume_from, Numbers(batch_size=2, seed=5), accelerator=accelerator, **settings)


def test_resuming_on_two_processes_gives_the_same_bits(pair: ProcessPool, tmp_path: Path) -> None:
    def run(folder: str, resume_from: str | None = None) -> list[Any]:
        if resume_from is not None:
            shutil.copytree(tmp_path / "whole", tmp_path / folder)
        checkpoint = None if resume_from is None else tmp_path / folder / resume_from
        pair(fit_on_ranks, tmp_path / folder, checkpoint)
        rows = [plain(row, averages=row["epoch"] != "1") for row in log(tmp_path / folder)]
        return [content(tmp_path / folder / "2_4_2_epoch.ckpt"), rows]

    whole = run("whole")
    assert run("within_a_window", "1_2_0_batch.ckpt") == whole
    assert run("end_of_an_epoch", "1_4_0_batch.ckpt") == whole


# ---- what cannot be restored


class WithSchedulers(TwoLayers):
    """So many schedulers on its one optimizer."""

    schedulers = 1
    make = torch.optim.SGD

    def configure_optimizers(self):
        optimizer = self.make(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(self.schedulers)]


STEPS = {"max_epochs": 9, "max_steps": 2}


@pytest.fixture
def checkpoint(train, tmp_path: Path) -> Path:
    train(module=WithSchedulers(), max_epochs=9, max_steps=1).save_checkpoint(tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


def test_another_number_of_schedulers_is_refused_before_anything_is_trained(
    make_trainer, loader, train, checkpoint: Path
) -> None:
    model = WithSchedulers()
    train(ExactResume(), module=model, resume=checkpoint, **STEPS)
    model.schedulers = 2
    trainer = make_trainer(callbacks=[ExactResume()], **STEPS)
    with pytest.raises(PolicyError, match=r"one\.ckpt holds 1 lr_schedulers, and this run needs 2:"):
        trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=True)
    assert trainer.global_step == 1


def test_the_state_of_another_optimizer_is_refused_by_what_it_lacks(train, checkpoint: Path) -> None:
    model = WithSchedulers()
    model.make = torch.optim.Adagrad
    with pytest.raises(PolicyError, match=r"is of another optimizer than this run's, which needs .*lr_decay"):
        train(ExactResume(), module=model, resume=checkpoint, **STEPS)


def test_a_file_that_is_no_checkpoint_is_refused_before_it_is_restored(make_trainer, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_text("no checkpoint")
    with pytest.raises(PolicyError, match=r"a\.ckpt"), checked_restore(make_trainer(), tmp_path / "a.ckpt"):
        raise AssertionError("restored")


def test_a_state_that_cannot_be_restored_is_named(make_trainer, loader, checkpoint: Path) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    saved["optimizer_states"][0]["param_groups"] = []
    torch.save(saved, checkpoint)
    message = r"one\.ckpt holds a state of another kind \(.*parameter groups"
    trainer = make_trainer(callbacks=[ExactResume()], **STEPS)
    with pytest.raises(PolicyError, match=message), checked_restore(trainer, checkpoint):
        trainer.fit(WithSchedulers(), loader, ckpt_path=checkpoint, weights_only=True)


# ---- the best checkpoint

# The best of all is seen early: a run that forgets it takes a later one.
SCORES = (0.5, 0.9, 0.3, 0.6, 0.7, 0.2)


class Scored(LightningModule):
    """Logs a given score after each epoch, and is killed at the start of one: nothing is saved."""

    def __init__(self, scores: tuple[float, ...], kill: int | None) -> None:
        super().__init__()
        self.layer, self.scores, self.kill = nn.Linear(1, 1), scores, kill

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.kill:
            raise KeyError("killed")

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layer(batch).square().sum()

    def validation_step(self, batch: Tensor, index: int) -> None:
        score = self.scores[self.current_epoch]
        self.log_dict({"score": score, "loss": 1 - score})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_scored(
    folder: Path,
    resume_from: Path | None = None,
    kill: int | None = None,
    scores: tuple[float, ...] = SCORES,
    best: tuple[dict[str, Any], ...] = ({},),
    last_every: int | None = None,
    **settings: Any,
) -> Trainer:
    """Trains in a folder, perhaps until it is killed, with the checkpoint callbacks that the config has."""
    named = {"filename": "best", "monitor": "score", "mode": "max", "enable_version_counter": False}
    last = {"filename": "last", "monitor": None, "every_n_train_steps": last_every}
    kept = [ModelCheckpoint(**{"dirpath": folder, **named, **own}) for own in (*best, last)]
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    trainer = Trainer(
        **{"max_epochs": len(scores), "accelerator": "cpu", "num_sanity_val_steps": 0, **quiet, **settings},
        callbacks=[ExactResume(folder), *kept],
        plugins=[AtomicCheckpointIO()],
    )
    data = DataLoader(torch.ones(2, 1))
    torch.manual_seed(0)
    with suppress(KeyError):
        trainer.fit(Scored(scores, kill), data, data, ckpt_path=resume_from, weights_only=True)
    return trainer


def kept(trainer: Trainer) -> list[tuple[Any, ...]]:
    """What the callbacks of a run hold as the best, with the weights in these files."""
    found: list[tuple[Any, ...]] = []
    for callback in trainer.checkpoint_callbacks:
        assert isinstance(callback, ModelCheckpoint)
        for path in [callback.best_model_path, *sorted(callback.best_k_models)]:
            assert Path(path).parent == Path(str(callback.dirpath))
            saved = torch.load(path, weights_only=True)
            weight = saved["state_dict"]["layer.weight"].item()
            found.append((Path(path).name, saved["global_step"], weight))
        score, worst = callback.best_model_score, Path(callback.kth_best_model_path).name
        numbers = (score, callback.current_score, callback.kth_value)
        found.append((worst, *(None if value is None else float(value) for value in numbers)))
    return found


SEVERAL = (
    {"filename": "score{epoch}", "save_top_k": 2},
    {"filename": "loss", "monitor": "loss", "mode": "min"},
)


@pytest.mark.parametrize("best", [({},), SEVERAL], ids=["default", "several"])
@pytest.mark.parametrize("killed_in", [2, 4])
@pytest.mark.filterwarnings("error:The dirpath has changed")
def test_a_resumed_run_ends_with_the_same_best_also_where_it_was_moved(
    tmp_path: Path, best: tuple, killed_in: int
) -> None:
    whole = fit_scored(tmp_path / "whole", best=best)
    fit_scored(tmp_path / "killed", kill=killed_in, best=best)
    (tmp_path / "killed").rename(tmp_path / "moved")
    resumed = fit_scored(tmp_path / "moved", tmp_path / "moved/last.ckpt", best=best)
    assert kept(resumed) == kept(whole)


def test_a_best_one_that_was_saved_after_the_last_is_reached_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"scores": (0.5, 0.3, 0.4, 0.9, 0.2), "last_every": 3}
    whole = fit_scored(tmp_path / "whole", **settings)
    # Last saved within the second epoch; the best of that time is overwritten at the end of the fourth.
    fit_scored(tmp_path / "killed", kill=4, **settings)
    resumed = fit_scored(tmp_path / "killed", tmp_path / "killed/last.ckpt", **settings)
    assert kept(resumed) == kept(whole)


def test_going_on_from_an_early_checkpoint_forgets_a_later_best(tmp_path: Path) -> None:
    fit_scored(
        tmp_path, best=({}, {"filename": "{epoch}", "monitor": "loss", "mode": "min", "save_top_k": -1})
    )
    branch = fit_scored(tmp_path, tmp_path / "epoch=0.ckpt", scores=(0.5, 0.1, 0.2))
    assert float(branch.checkpoint_callbacks[0].best_model_score) == pytest.approx(0.2)  # type: ignore[attr-defined]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["best.ckpt", "epoch=0.ckpt", "last.ckpt"]


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"x")], ids=["gone", "damaged"])
def test_a_best_one_that_is_gone_is_told_and_does_not_count(tmp_path: Path, spoil: Callable) -> None:
    settings: dict[str, Any] = {"best": ({"filename": "{epoch}", "save_top_k": 3},)}
    fit_scored(tmp_path, kill=3, **settings)
    spoil(tmp_path / "epoch=1.ckpt")
    with pytest.warns(UserWarning, match=r"epoch=1.ckpt \(score 0.9\) does not count among the best"):
        resumed = fit_scored(tmp_path, tmp_path / "last.ckpt", **settings)
    callback = resumed.checkpoint_callbacks[0]
    assert isinstance(callback, ModelCheckpoint)
    names = {Path(path).name for path in callback.best_k_models}
    assert names == {"epoch=0.ckpt", "epoch=3.ckpt", "epoch=4.ckpt"}


def test_no_name_in_a_checkpoint_leads_out_of_the_directory(tmp_path: Path) -> None:
    fit_scored(tmp_path / "run", kill=3)
    precious = str(shutil.copy(tmp_path / "run/best.ckpt", tmp_path / "precious.ckpt"))
    saved = torch.load(tmp_path / "run/last.ckpt", weights_only=True)
    for state in saved["callbacks"].values():
        state |= {"best_k_models": {precious: torch.tensor(0.1)}, "best_model_path": precious}
    torch.save(saved, tmp_path / "run/last.ckpt")
    fit_scored(tmp_path / "run", tmp_path / "run/last.ckpt")
    assert Path(precious).is_file()


def test_a_test_of_another_checkpoint_does_not_change_the_best(tmp_path: Path) -> None:
    fit_scored(tmp_path / "former")
    trainer = fit_scored(tmp_path / "run")
    before = kept(trainer)
    data = DataLoader(torch.ones(2, 1))
    trainer.validate(
        Scored((0.0,) * 9, None), data, ckpt_path=tmp_path / "former/last.ckpt", weights_only=True
    )
    assert kept(trainer) == before
