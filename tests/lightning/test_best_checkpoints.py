"""A resumed run keeps the best checkpoint of the run before, wherever it writes."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from gradpolicy.distributed.sharded_checkpoint import MARKER, is_whole
from gradpolicy.errors import PolicyError
from gradpolicy.lightning.best_checkpoints import BestCheckpoints, best_checkpoint, best_scores, copy_whole
from gradpolicy.lightning.exact_resume import ExactResume

# The best of all is seen early: a run that forgets it takes a later one.
SCORES = (0.5, 0.9, 0.3, 0.6, 0.7, 0.2)


class Scored(LightningModule):
    """Logs a given score after each epoch."""

    def __init__(self, scores: tuple[float, ...] = SCORES) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.scores = scores

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).square().sum()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        score = self.scores[self.current_epoch]
        self.log_dict({"score": score, "loss": 1 - score})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Kill(Callback):
    """Ends a run at the end of an epoch's training, as a kill does: nothing is saved."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            raise KeyError("killed")


def keep(folder: Path, **settings: Any) -> ModelCheckpoint:
    """A checkpoint callback as the config has it."""
    named = {"filename": "best", "monitor": "score", "mode": "max", "enable_version_counter": False}
    return ModelCheckpoint(**{"dirpath": folder / "checkpoints", **named, **settings})


def fit(
    folder: Path,
    resume_from: Path | None = None,
    kill: int | None = None,
    scores: tuple[float, ...] = SCORES,
    best: tuple[dict[str, Any], ...] = ({},),
    last_every: int | None = None,
    **settings: Any,
) -> Trainer:
    """Trains in a folder, perhaps until it is killed."""
    last = keep(folder, filename="last", monitor=None, every_n_train_steps=last_every)
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    trainer = Trainer(
        **{"max_epochs": len(scores), "accelerator": "cpu", "num_sanity_val_steps": 0, **quiet, **settings},
        callbacks=[
            ExactResume(),
            BestCheckpoints(),
            *(keep(folder, **own) for own in best),
            last,
            *([Kill(kill)] if kill is not None else []),
        ],
    )
    data = DataLoader(torch.ones(2, 1))
    torch.manual_seed(0)
    try:
        trainer.fit(
            Scored(scores), data, data, ckpt_path=resume_from, weights_only=True if resume_from else None
        )
    except KeyError:
        assert kill is not None
    return trainer


def kept(trainer: Trainer) -> list[tuple[Any, ...]]:
    """What the callbacks of a run hold as the best, with the weights in these files."""
    found = []
    for callback in trainer.checkpoint_callbacks:
        assert isinstance(callback, ModelCheckpoint)
        for path in [callback.best_model_path, *sorted(callback.best_k_models)]:
            assert Path(path).parent == Path(str(callback.dirpath))
            content = torch.load(path, weights_only=True)
            found.append(
                (Path(path).name, content["global_step"], content["state_dict"]["layer.weight"].item())
            )
        score = callback.best_model_score
        worst = Path(callback.kth_best_model_path).name
        current = callback.current_score
        numbers = [None if value is None else float(value) for value in (score, current, callback.kth_value)]
        found.append((worst, *numbers))
    return found


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(num_workers|log_every_n_steps|is not empty|litlogger).*")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


SEVERAL = (
    {"filename": "score{epoch}", "save_top_k": 2},
    {"filename": "loss", "monitor": "loss", "mode": "min"},
)


@pytest.mark.parametrize("best", [({},), SEVERAL], ids=["default", "several"])
@pytest.mark.parametrize("killed_in", [2, 4])
@pytest.mark.filterwarnings("error:The dirpath has changed")
def test_a_run_resumed_elsewhere_ends_with_the_same_best(
    tmp_path: Path, best: tuple[dict[str, Any], ...], killed_in: int
) -> None:
    whole = fit(tmp_path / "whole", best=best)
    fit(tmp_path / "killed", kill=killed_in, best=best)
    resumed = fit(tmp_path / "resumed", tmp_path / "killed/checkpoints/last.ckpt", best=best)
    assert kept(resumed) == kept(whole)
    assert float(resumed.checkpoint_callbacks[0].best_model_score) == pytest.approx(0.9)


def test_so_does_one_resumed_in_its_own_directory(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "killed", kill=3)
    assert kept(fit(tmp_path / "killed", tmp_path / "killed/checkpoints/last.ckpt")) == kept(whole)


def test_so_does_one_whose_run_directory_was_moved(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "killed", kill=3)
    (tmp_path / "killed").rename(tmp_path / "moved")
    assert kept(fit(tmp_path / "resumed", tmp_path / "moved/checkpoints/last.ckpt")) == kept(whole)


def test_so_does_one_of_several_directories_that_were_moved(tmp_path: Path) -> None:
    def run(name: str, *resume_from: Path, **settings: Any) -> Trainer:
        folder = tmp_path / name
        return fit(folder, *resume_from, best=({"dirpath": folder / "best"},), **settings)

    whole = run("whole")
    run("killed", kill=3)
    (tmp_path / "killed").rename(tmp_path / "moved")
    assert kept(run("resumed", tmp_path / "moved/checkpoints/last.ckpt")) == kept(whole)


def test_so_does_one_whose_last_was_renamed_and_moved(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "killed", kill=3)
    (tmp_path / "killed").rename(tmp_path / "moved")
    mine = (tmp_path / "moved/checkpoints/last.ckpt").rename(tmp_path / "moved/checkpoints/mine.ckpt")
    assert kept(fit(tmp_path / "resumed", mine)) == kept(whole)


def test_so_does_one_whose_last_alone_was_copied(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "killed", kill=3)
    (tmp_path / "copy").mkdir()
    last = shutil.copy(tmp_path / "killed/checkpoints/last.ckpt", tmp_path / "copy")
    assert kept(fit(tmp_path / "resumed", Path(last))) == kept(whole)


def test_so_does_one_that_keeps_weights_alone(tmp_path: Path) -> None:
    settings = {"best": ({"save_weights_only": True},)}
    whole = fit(tmp_path / "whole", **settings)
    fit(tmp_path / "killed", kill=3, **settings)
    assert kept(fit(tmp_path / "resumed", tmp_path / "killed/checkpoints/last.ckpt", **settings)) == kept(
        whole
    )


def test_a_callback_that_the_run_before_did_not_have_begins_anew(tmp_path: Path) -> None:
    fit(tmp_path / "killed", kill=3)
    last = tmp_path / "killed/checkpoints/last.ckpt"
    resumed = fit(
        tmp_path / "resumed", last, best=({}, {"filename": "loss", "monitor": "loss", "mode": "min"})
    )
    assert best_scores(resumed) == pytest.approx({"score_best": 0.9, "loss_best": 0.3})


def test_a_test_of_another_checkpoint_does_not_change_the_best(tmp_path: Path) -> None:
    trainer = fit(tmp_path, best=({}, {"filename": "{epoch}", "save_top_k": -1, "monitor": "loss"}))
    before = kept(trainer)
    first = tmp_path / "checkpoints/epoch=0.ckpt"
    data = DataLoader(torch.ones(2, 1))
    trainer.validate(Scored((*SCORES, 1.0)), data, ckpt_path=first, weights_only=True, verbose=False)
    assert kept(trainer) == before


def test_a_copied_run_directory_counts_and_not_what_became_of_the_original(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "killed", kill=3)
    shutil.copytree(tmp_path / "killed", tmp_path / "copy")
    (tmp_path / "killed/checkpoints/best.ckpt").write_bytes(b"")
    assert kept(fit(tmp_path / "resumed", tmp_path / "copy/checkpoints/last.ckpt")) == kept(whole)


def test_a_run_that_had_only_to_be_tested_has_its_best_too(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    resumed = fit(tmp_path / "resumed", tmp_path / "whole/checkpoints/last.ckpt")
    assert kept(resumed) == kept(whole)
    assert (tmp_path / "resumed/checkpoints/last.ckpt").is_file()


@pytest.mark.parametrize("best", [({},), ({"save_top_k": 2, "filename": "{epoch}"},)], ids=["one", "two"])
def test_a_best_one_that_was_saved_after_the_last_is_reached_again(
    tmp_path: Path, best: tuple[dict[str, Any], ...]
) -> None:
    scores = (0.5, 0.3, 0.4, 0.9, 0.2)
    settings = {"scores": scores, "best": best, "last_every": 3}
    whole = fit(tmp_path / "whole", **settings)
    # Last saved within the second epoch; the best of that time is overwritten at the end of the fourth.
    fit(tmp_path / "killed", kill=4, **settings)
    last = tmp_path / "killed/checkpoints/last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 6
    resumed = fit(tmp_path / "resumed", last, **settings)
    assert kept(resumed) == kept(whole)


def test_a_branch_does_not_inherit_the_best_of_a_later_time(tmp_path: Path) -> None:
    fit(
        tmp_path / "run",
        best=({}, {"filename": "{epoch}", "monitor": "loss", "mode": "min", "save_top_k": -1}),
    )
    early = tmp_path / "run/checkpoints/epoch=0.ckpt"
    with pytest.warns(UserWarning, match=r"best.ckpt \(score 0.5\) .* was overwritten later"):
        branch = fit(tmp_path / "branch", early, scores=(0.5, 0.1, 0.2))
    assert float(branch.checkpoint_callbacks[0].best_model_score) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("spoil", "words"), [(Path.unlink, "is gone"), (lambda path: path.write_bytes(b"x"), "cannot be used")]
)
def test_a_best_one_that_is_gone_is_told_and_does_not_count(
    tmp_path: Path, spoil: Callable[[Path], Any], words: str
) -> None:
    fit(tmp_path / "killed", kill=3)
    spoil(tmp_path / "killed/checkpoints/best.ckpt")
    with pytest.warns(UserWarning, match=rf"best.ckpt \(score 0.9\) of the run that is resumed {words}"):
        resumed = fit(tmp_path / "resumed", tmp_path / "killed/checkpoints/last.ckpt")
    callback = resumed.checkpoint_callbacks[0]
    assert float(callback.best_model_score) == pytest.approx(0.7)
    assert Path(callback.best_model_path) == tmp_path / "resumed/checkpoints/best.ckpt"


@pytest.mark.parametrize("watched", [{}, {"monitor": "loss", "mode": "min"}], ids=["max", "min"])
@pytest.mark.filterwarnings("ignore:epoch=1.ckpt .* is gone")
def test_if_one_of_several_is_gone_the_others_count(tmp_path: Path, watched: dict[str, str]) -> None:
    settings = {"best": ({"filename": "{epoch}", "save_top_k": 3, **watched},)}
    fit(tmp_path / "killed", kill=3, **settings)
    (tmp_path / "killed/checkpoints/epoch=1.ckpt").unlink()
    last = tmp_path / "killed/checkpoints/last.ckpt"
    ended = fit(tmp_path / "ended", last, scores=SCORES[:3], **settings)
    assert best_checkpoint(ended) == tmp_path / "ended/checkpoints/epoch=0.ckpt"
    assert list(best_scores(ended).values()) == pytest.approx([0.5])
    resumed = fit(tmp_path / "resumed", last, **settings)
    names = {Path(path).name for path in resumed.checkpoint_callbacks[0].best_k_models}
    assert names == {"epoch=0.ckpt", "epoch=3.ckpt", "epoch=4.ckpt"}


def with_another_score(content: dict[str, Any]) -> None:
    (state,) = (state for state in content["callbacks"].values() if state.get("best_k_models"))
    state["best_k_models"] = dict.fromkeys(state["best_k_models"], torch.tensor(0.95))


@pytest.mark.parametrize(
    "overwrite", [with_another_score, lambda content: content.update(global_step=100)], ids=["score", "step"]
)
def test_a_best_one_of_another_score_or_a_later_step_does_not_count(
    tmp_path: Path, overwrite: Callable[[dict[str, Any]], None]
) -> None:
    fit(tmp_path / "killed", kill=3)
    best = tmp_path / "killed/checkpoints/best.ckpt"
    content = torch.load(best, weights_only=True)
    overwrite(content)
    torch.save(content, best)
    with pytest.warns(UserWarning, match=r"best.ckpt \(score 0.9\) .* was overwritten later"):
        resumed = fit(tmp_path / "resumed", tmp_path / "killed/checkpoints/last.ckpt")
    assert float(resumed.checkpoint_callbacks[0].best_model_score) == pytest.approx(0.7)


def test_a_save_that_waits_for_the_next_validation_is_not_lost(tmp_path: Path) -> None:
    best = ({"every_n_train_steps": 3},)
    settings = {"best": best, "last_every": 3, "check_val_every_n_epoch": 2}
    whole = fit(tmp_path / "whole", **settings)
    fit(tmp_path / "killed", kill=2, **settings)
    last = tmp_path / "killed/checkpoints/last.ckpt"
    resumed = fit(tmp_path / "resumed", last, **settings)
    assert kept(resumed) == kept(whole)


def renamed(checkpoint: Path, name: str) -> None:
    """Has a checkpoint name its best one otherwise, as a stranger might."""
    content = torch.load(checkpoint, weights_only=True)
    for state in content["callbacks"].values():
        if state.get("best_k_models"):
            (former, score), folder = *state["best_k_models"].items(), Path(state["dirpath"])
            state |= {"best_k_models": {f"{folder}/{name}": score}, "best_model_path": f"{folder}/{name}"}
            (folder / name).parent.mkdir(exist_ok=True)
            best = torch.load(former, weights_only=True)
            key = next(key for key, value in best["callbacks"].items() if value.get("best_k_models"))
            best["callbacks"][key]["best_k_models"] = {f"{folder}/{name}": score}
            torch.save(best, folder / name)
    torch.save(content, checkpoint)


def test_no_name_in_a_checkpoint_leads_out_of_the_directory(tmp_path: Path) -> None:
    fit(tmp_path / "a/killed", kill=3)
    last = tmp_path / "a/killed/checkpoints/last.ckpt"
    renamed(last, "../../mine.ckpt")
    with pytest.warns(UserWarning, match="lies outside of its directory"):
        fit(tmp_path / "b/resumed", last)
    assert not list((tmp_path / "b").glob("*.ckpt"))


def test_no_name_in_a_checkpoint_replaces_what_this_run_would_not_write(tmp_path: Path) -> None:
    fit(tmp_path / "killed", kill=3)
    last = tmp_path / "killed/checkpoints/last.ckpt"
    renamed(last, "mine.ckpt")
    theirs, mine = last.with_name("mine.ckpt"), tmp_path / "resumed/checkpoints/mine.ckpt"
    mine.parent.mkdir(parents=True)
    # Neither its size nor its time tells it from the other.
    mine.write_bytes(bytes(theirs.stat().st_size))
    os.utime(mine, ns=(theirs.stat().st_atime_ns, theirs.stat().st_mtime_ns))
    with pytest.raises(PolicyError, match=r"mine\.ckpt exists already and is of another run"):
        fit(tmp_path / "resumed", last)
    assert not any(mine.read_bytes())


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_directory_of_shards_is_copied_as_a_whole(tmp_path: Path, interrupted: bool) -> None:
    source, target = tmp_path / "former/best.ckpt", tmp_path / "now/best.ckpt"
    for folder, text in ((source, "new"), (target, "old")):
        folder.mkdir(parents=True)
        for name in (".metadata", "meta.pt", MARKER):
            (folder / name).write_text(text)
    if interrupted:
        # What the copy before has left.
        (target.parent / ".best.ckpt.copied").mkdir()
    copy_whole(source, target)
    assert is_whole(target)
    assert {path.read_text() for path in target.iterdir()} == {"new"}
    assert [path.name for path in target.parent.iterdir()] == ["best.ckpt"]


def test_a_copy_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "former.ckpt", tmp_path / "best.ckpt"
    source.write_text("new")
    target.write_text("old")

    def full(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="no space left"):
        copy_whole(source, target)
    assert target.read_text() == "old"


def test_a_copy_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "former.ckpt", tmp_path / "best.ckpt"
    source.write_text("new")
    synced: list[tuple[bool, str]] = []

    def note(descriptor: int) -> None:
        whole = os.path.samestat(os.fstat(descriptor), tmp_path.stat()) or os.fstat(descriptor).st_size == 3
        synced.append((whole, target.read_text() if target.exists() else ""))

    monkeypatch.setattr(os, "fsync", note)
    copy_whole(source, target)
    assert synced == [(True, ""), (True, "new")]


def test_a_file_is_not_copied_onto_itself(tmp_path: Path) -> None:
    path, link = tmp_path / "best.ckpt", tmp_path / "link.ckpt"
    path.write_text("best")
    link.symlink_to(path)
    copy_whole(path, link)
    assert link.is_symlink()
    assert path.read_text() == "best"


def test_the_best_is_one_that_watches_a_metric(tmp_path: Path) -> None:
    trainer = fit(tmp_path, best=({"filename": "newest", "monitor": None, "every_n_epochs": 2}, {}))
    assert best_checkpoint(trainer) == tmp_path / "checkpoints/best.ckpt"


def test_without_a_checkpoint_there_is_no_best(make_trainer, tmp_path: Path) -> None:
    trainer = make_trainer(enable_checkpointing=True, callbacks=[keep(tmp_path)])
    assert best_checkpoint(trainer) is None
    assert best_scores(trainer) == {}


@pytest.mark.slow
def test_two_processes_share_one_copy(tmp_path: Path) -> None:
    settings = {"strategy": "ddp_fork", "devices": 2}
    fit(tmp_path / "whole", **settings)
    fit(tmp_path / "killed", max_epochs=3, **settings)
    fit(tmp_path / "resumed", tmp_path / "killed/checkpoints/last.ckpt", **settings)
    ends = [
        torch.load(tmp_path / name / "checkpoints/best.ckpt", weights_only=True)
        for name in ("whole", "resumed")
    ]
    assert ends[0]["global_step"] == ends[1]["global_step"]
    assert torch.equal(ends[0]["state_dict"]["layer.weight"], ends[1]["state_dict"]["layer.weight"])
