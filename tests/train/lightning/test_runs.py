"""Finding a run, its last and best checkpoint, and starting from the weights of another run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from gradpolicy.errors import PolicyError
from gradpolicy.train.lightning.checkpoints import read_checkpoint
from gradpolicy.train.lightning.resumed_files import cut_checkpoints
from gradpolicy.train.lightning.runs import (
    RECORD,
    InitialWeights,
    RunRecord,
    best_checkpoint,
    best_scores,
    find_checkpoint,
    list_checkpoint,
    run_of,
)


def save(path: Path, step: int = 0, age: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": nn.Linear(2, 3).state_dict(), "global_step": step}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def cut(path: Path) -> Path:
    """What is left of a checkpoint that was not written to its end."""
    path.write_bytes(path.read_bytes()[:200])
    return path


def run(place: Path, started: float, kind: str = "run", task: str = "train") -> Path:
    """The ``last.ckpt`` of a run that left a record."""
    last = save(place / "checkpoints/last.ckpt")
    checkpoints = ["checkpoints/last.ckpt"]
    RunRecord(task, kind, started, str(place), checkpoints=checkpoints).save()  # type: ignore[arg-type]
    return last


# ---- the record


def test_a_record_that_is_saved_is_loaded_again(tmp_path: Path) -> None:
    record = RunRecord.begin(tmp_path, "train", "sweep", ["seed=3"])
    record.save()
    assert RunRecord.load(tmp_path) == record
    assert set(record.versions) == {"gradpolicy", "python", "torch", "lightning", "numpy", "hydra-core"}
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]


@pytest.mark.parametrize("content", [None, "no json", "[]", '{"task": "train"}'])
def test_a_record_that_is_absent_or_damaged_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / RECORD).write_text(content)
    assert RunRecord.load(tmp_path) is None


def test_a_kind_that_does_not_exist_is_no_record(tmp_path: Path) -> None:
    RunRecord("train", "other", 1.0, str(tmp_path)).save()  # type: ignore[arg-type]
    assert RunRecord.load(tmp_path) is None


# ---- last


def test_nothing_is_found_where_nothing_is_asked_for(tmp_path: Path) -> None:
    assert find_checkpoint(None, tmp_path) is None


def test_last_is_that_of_the_run_that_began_last(tmp_path: Path) -> None:
    run(tmp_path / "train/runs/b", 1.0)
    new = run(tmp_path / "train/runs/a", 2.0)
    save(tmp_path / "no_run/checkpoints/last.ckpt")
    assert find_checkpoint("last", tmp_path, task="train") == new


def test_the_runs_own_directory_comes_before_all_runs(tmp_path: Path) -> None:
    run(tmp_path / "other", 2.0)
    own = run(tmp_path / "own", 1.0)
    assert find_checkpoint("last", tmp_path, own=tmp_path / "own") == own


def test_a_copy_does_not_come_before_its_original(tmp_path: Path) -> None:
    original = run(tmp_path / "runs/2026-01-01", 2.0)
    shutil.copytree(original.parents[1], tmp_path / "runs/copy")
    assert find_checkpoint("last", tmp_path) == original
    shutil.rmtree(original.parents[1])
    assert find_checkpoint("last", tmp_path) == tmp_path / "runs/copy/checkpoints/last.ckpt"


def test_what_is_newer_and_does_not_count_is_told_in_one_line(tmp_path: Path) -> None:
    mine = run(tmp_path / "train/runs/mine", 1.0)
    for number, (kind, task) in enumerate([("sweep", "train"), ("trial", "train"), ("run", "debug")]):
        run(tmp_path / str(number), 2.0 + number, kind, task)
    run(tmp_path / "none", 7.0).unlink()
    damaged = cut(run(tmp_path / "damaged", 8.0))
    with pytest.warns(UserWarning, match="skipped") as told:
        assert find_checkpoint("last", tmp_path, task="train") == mine
    (line,) = [str(each.message) for each in told if "ckpt_path=last" in str(each.message)]
    assert line.startswith(f"ckpt_path=last means {mine}; skipped: {damaged} is ")
    assert line.endswith("; none, which holds no checkpoint")


def test_where_there_is_none_it_says_what_is_there(tmp_path: Path) -> None:
    nothing = f"ckpt_path=last: no good checkpoint below {tmp_path}"
    with pytest.raises(PolicyError, match=f"^{nothing}; jobs of sweeps go by their directories$"):
        find_checkpoint("last", tmp_path)
    last = cut(run(tmp_path / "run", 1.0))
    with pytest.raises(PolicyError, match=rf"^{nothing}; skipped: {last} is "):
        find_checkpoint("last", tmp_path)


# ---- a run directory, a file


def test_of_a_directory_the_one_named_last_counts_then_the_one_furthest_in_training(tmp_path: Path) -> None:
    save(tmp_path / "last-v1.ckpt", step=1)
    last = save(tmp_path / "last.ckpt", step=5, age=50)
    near = save(tmp_path / "a.ckpt", step=7)
    far = save(tmp_path / "b.ckpt", step=9, age=50)
    assert find_checkpoint(str(tmp_path), tmp_path) == last
    for path in tmp_path.glob("last*"):
        cut(path)
    with pytest.warns(UserWarning, match="^ckpt_path: skipped: .*last-v1.ckpt is .*last.ckpt is "):
        assert find_checkpoint(str(tmp_path), tmp_path) == far
    assert find_checkpoint(str(near), tmp_path) == near


def test_a_run_owns_the_checkpoints_that_its_record_lists(tmp_path: Path) -> None:
    deep, other = (
        save(tmp_path / "a/csv/version_0/checkpoints/last.ckpt"),
        save(tmp_path / "a/b.ckpt", step=9),
    )
    assert find_checkpoint(str(tmp_path / "a"), tmp_path) == other
    RunRecord("train", "run", 1.0, str(tmp_path / "a")).save()
    with pytest.raises(PolicyError, match="no good checkpoint in the directory"):
        find_checkpoint(str(tmp_path / "a"), tmp_path)
    list_checkpoint(tmp_path / "a", deep)
    assert find_checkpoint(str(tmp_path / "a"), tmp_path) == deep
    assert run_of(deep) == tmp_path / "a"
    assert run_of(other) is None
    cut_checkpoints(tmp_path / "a", -1)
    assert (deep.exists(), other.exists()) == (False, True)


@pytest.mark.parametrize(
    "name", ["../theirs/last.ckpt", "link/last.ckpt", "link.ckpt", "{}/theirs/last.ckpt"]
)
def test_no_name_in_a_record_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    theirs, mine = save(tmp_path / "theirs/last.ckpt", step=9), tmp_path / "mine"
    mine.mkdir()
    (mine / "link").symlink_to(theirs.parent)
    (mine / "link.ckpt").symlink_to(theirs)
    RunRecord("train", "run", 1.0, str(mine), checkpoints=[name.format(tmp_path)]).save()
    cut_checkpoints(mine, 0)
    assert theirs.exists()
    assert run_of(theirs) is None
    with pytest.raises(PolicyError, match="no good checkpoint in the directory"):
        find_checkpoint(str(mine), tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_directory_of_shards_is_refused_or_passed_over(tmp_path: Path) -> None:
    good, shards = save(tmp_path / "a.ckpt"), tmp_path / "last.ckpt"
    dcp.save({"state_dict": nn.Linear(1, 1).state_dict()}, checkpoint_id=shards, no_dist=True)
    with pytest.raises(PolicyError, match=r"last\.ckpt is a directory, .* dcp_to_torch DIRECTORY FILE"):
        find_checkpoint(str(shards), tmp_path)
    with pytest.warns(UserWarning, match=r"skipped: .*last\.ckpt is a directory"):
        assert find_checkpoint(str(tmp_path), tmp_path) == good
    dcp_to_torch_save(shards, tmp_path / "file.ckpt")
    assert read_checkpoint(tmp_path / "file.ckpt")["state_dict"].keys() == {"weight", "bias"}


@pytest.mark.parametrize("asked", ["a" * 5000, "a/" * 2500])
def test_a_path_that_is_too_long_is_refused_in_a_short_line(asked: str) -> None:
    with pytest.raises(PolicyError) as refused:
        find_checkpoint(asked, Path())
    assert str(refused.value).startswith("ckpt_path: a")
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("lats.ckpt", "did you mean 'last.ckpt'?"),
        ("absent/last.ckpt", "absent either; ckpt_path=last finds the newest"),
        ("empty/last.ckpt", "does not exist; ckpt_path=last finds the newest"),
    ],
)
def test_a_path_that_does_not_exist_is_answered_with_what_is_near(
    tmp_path: Path, asked: str, hint: str
) -> None:
    save(tmp_path / "last.ckpt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PolicyError) as refused:
        find_checkpoint(str(tmp_path / asked), tmp_path)
    assert str(refused.value).startswith(f"ckpt_path: {tmp_path / asked} does not exist; ")
    assert str(refused.value).endswith(hint)


def test_a_pipe_or_device_is_refused_or_passed_over(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"^ckpt_path: /dev/zero is neither a file nor a directory$"):
        find_checkpoint("/dev/zero", tmp_path)
    good = save(tmp_path / "good.ckpt")
    os.mkfifo(tmp_path / "last.ckpt")
    with pytest.warns(match=r"last.ckpt is neither a file nor a directory"):
        assert find_checkpoint(str(tmp_path), tmp_path) == good


def test_checkpoints_after_a_step_are_cut_and_damaged_ones_left(tmp_path: Path) -> None:
    kept = [save(tmp_path / "a.ckpt", step=3), cut(save(tmp_path / "b.ckpt", step=9))]
    for path in (*kept, save(tmp_path / "checkpoints/c.ckpt", step=4)):
        list_checkpoint(tmp_path, path)
    cut_checkpoints(tmp_path, 3)
    assert sorted(tmp_path.rglob("*.ckpt")) == kept


# ---- the best


def test_the_best_is_one_that_watches_a_metric(tmp_path: Path) -> None:
    newest, best = (ModelCheckpoint(monitor=monitor) for monitor in (None, "score"))
    newest.best_model_path, best.best_model_path = "last.ckpt", "best.ckpt"
    best.best_model_score = torch.tensor(0.5)
    trainer = Trainer(callbacks=[newest, best], logger=False, default_root_dir=tmp_path)
    assert best_checkpoint(trainer) == Path("best.ckpt")
    assert best_scores(trainer) == {"score_best": 0.5}


def test_without_a_checkpoint_there_is_no_best(make_trainer: Callable[..., Trainer]) -> None:
    assert best_checkpoint(make_trainer()) is None
    assert best_scores(make_trainer()) == {}


# ---- start weights


@pytest.fixture
def weights(two_layers, tmp_path: Path) -> str:
    path = tmp_path / "base.ckpt"
    torch.save({"state_dict": {k: torch.full_like(v, 0.5) for k, v in two_layers.state_dict().items()}}, path)
    return str(path)


def test_training_starts_from_the_checkpoints_weights_and_a_test_does_not(
    two_layers, loader, make_trainer, train, weights: str
) -> None:
    make_trainer(callbacks=[InitialWeights(weights)]).test(two_layers, loader, verbose=False)
    assert not any(bool((weight == 0.5).all()) for weight in two_layers.state_dict().values())
    trainer = train(InitialWeights(weights), max_steps=0)
    assert all(bool((weight == 0.5).all()) for weight in two_layers.state_dict().values())
    assert trainer.global_step == 0


def test_no_path_warns_that_the_weights_are_fresh(train) -> None:
    with pytest.warns(UserWarning, match="fresh weights"):
        train(InitialWeights(), max_steps=1)


@pytest.mark.parametrize(("name", "problem"), [("other", "is of another model"), ("none", "is not a file")])
def test_weights_that_are_absent_or_of_another_model_are_refused(
    train, tmp_path: Path, name: str, problem: str
) -> None:
    torch.save({"state_dict": {"head.weight": torch.zeros(3, 8)}}, tmp_path / "other.ckpt")
    with pytest.raises(PolicyError, match=rf"^callbacks\.initial_weights\.path: .*{problem}"):
        train(InitialWeights(str(tmp_path / f"{name}.ckpt")))
