"""Finding the checkpoint that `ckpt_path` names."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from gradpolicy.distributed.sharded_checkpoint import MARKER, save_whole
from gradpolicy.errors import PolicyError
from gradpolicy.lightning.checkpoint_reading import read_checkpoint
from gradpolicy.lightning.find_checkpoint import find_checkpoint
from gradpolicy.lightning.run_record import RunRecord


def save(path: Path, model: nn.Module, age: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": model.state_dict()}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 3)


def test_nothing_is_found_where_nothing_is_asked_for(tmp_path: Path) -> None:
    assert find_checkpoint(None, [tmp_path]) is None


def test_last_is_the_newest_that_can_be_read(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "old/checkpoints/last.ckpt", model, age=20)
    good = save(tmp_path / "middle/checkpoints/last.ckpt", model, age=10)
    cut = save(tmp_path / "new/checkpoints/last.ckpt", model)
    cut.write_bytes(cut.read_bytes()[:200])
    with pytest.warns(UserWarning, match="passed over"):
        assert find_checkpoint("last", [tmp_path]) == good


def test_another_checkpoint_of_the_same_run_comes_before_those_of_other_runs(
    tmp_path: Path, model: nn.Module
) -> None:
    save(tmp_path / "old/checkpoints/last.ckpt", model, age=10)
    best = save(tmp_path / "new/checkpoints/best.ckpt", model, age=20)
    cut = save(tmp_path / "new/checkpoints/last.ckpt", model)
    cut.write_bytes(cut.read_bytes()[:200])
    with pytest.warns(UserWarning, match="passed over"):
        assert find_checkpoint("last", [tmp_path]) == best


def test_the_runs_own_directory_comes_before_all_runs(tmp_path: Path, model: nn.Module) -> None:
    own = save(tmp_path / "own/checkpoints/last.ckpt", model, age=50)
    save(tmp_path / "other/checkpoints/last.ckpt", model)
    assert find_checkpoint("last", [tmp_path / "own", tmp_path]) == own


def test_a_run_directory_means_the_newest_in_it(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "checkpoints/best.ckpt", model, age=5)
    last = save(tmp_path / "checkpoints/last.ckpt", model)
    assert find_checkpoint(str(tmp_path), []) == last


def run_of(
    place: Path, model: nn.Module, started: float, kind: str = "run", task: str = "train", age: float = 0.0
) -> Path:
    """The directory of a run that left a record and ``last.ckpt``."""
    save(place / "checkpoints/last.ckpt", model, age)
    RunRecord(task, kind, started, str(place)).save()
    return place


def test_the_run_that_began_last_is_the_newest_whatever_file_times_say(
    tmp_path: Path, model: nn.Module
) -> None:
    run_of(tmp_path / "train/runs/old", model, started=1.0, age=0)
    new = run_of(tmp_path / "train/runs/new", model, started=2.0, age=1000)
    assert find_checkpoint("last", [tmp_path], "train") == new / "checkpoints/last.ckpt"


def test_a_copy_does_not_come_before_its_original(tmp_path: Path, model: nn.Module) -> None:
    original = run_of(tmp_path / "train/runs/2026-01-01", model, started=2.0, age=1000)
    copy = shutil.copytree(original, tmp_path / "train/runs/copy")
    (copy / "checkpoints/last.ckpt").touch()
    assert find_checkpoint("last", [tmp_path]) == original / "checkpoints/last.ckpt"
    shutil.rmtree(original)
    assert find_checkpoint("last", [tmp_path]) == copy / "checkpoints/last.ckpt"


def test_runs_without_a_record_come_last_and_are_told_apart_by_file_times(
    tmp_path: Path, model: nn.Module
) -> None:
    runs = tmp_path / "train/runs"
    save(runs / "old/checkpoints/last.ckpt", model, age=1000)
    new = save(runs / "new/checkpoints/last.ckpt", model, age=10)
    assert find_checkpoint("last", [tmp_path]) == new
    recorded = run_of(runs / "recorded", model, started=1.0, age=2000)
    assert find_checkpoint("last", [tmp_path]) == recorded / "checkpoints/last.ckpt"


def test_jobs_of_sweeps_trials_and_other_tasks_are_passed_over_and_counted(
    tmp_path: Path, model: nn.Module
) -> None:
    mine = run_of(tmp_path / "train/runs/mine", model, started=1.0)
    run_of(tmp_path / "train/sweeps/now/0", model, started=2.0, kind="sweep")
    run_of(tmp_path / "train/sweeps/now/1", model, started=3.0, kind="sweep")
    run_of(tmp_path / "learning_rate/0", model, started=4.0, kind="trial")
    run_of(tmp_path / "debug/runs/one", model, started=5.0, task="debug")
    with pytest.warns(UserWarning, match="passed over") as told:
        assert find_checkpoint("last", [tmp_path], "train") == mine / "checkpoints/last.ckpt"
    (line,) = [str(warning.message) for warning in told]
    assert line == (
        f"ckpt_path=last means {mine}/checkpoints/last.ckpt; passed over: a run of task 'debug';"
        " a trial of a study; a job of a sweep (2)"
    )


def test_a_newer_run_that_holds_no_checkpoint_is_named(tmp_path: Path, model: nn.Module) -> None:
    old = run_of(tmp_path / "train/runs/old", model, started=1.0)
    new = run_of(tmp_path / "train/runs/new", model, started=2.0)
    (new / "checkpoints/last.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"passed over: new, which holds no last\*\.ckpt$"):
        assert find_checkpoint("last", [tmp_path]) == old / "checkpoints/last.ckpt"


def test_within_a_run_the_one_furthest_in_training_counts(tmp_path: Path, model: nn.Module) -> None:
    far, near = tmp_path / "checkpoints/last.ckpt", tmp_path / "checkpoints/last-v1.ckpt"
    for path, step, age in ((far, 20, 50.0), (near, 10, 0.0)):
        save(path, model)
        torch.save({"state_dict": model.state_dict(), "global_step": step}, path)
        os.utime(path, (1e9 - age, 1e9 - age))
    assert find_checkpoint(str(tmp_path), []) == far
    assert find_checkpoint("last", [tmp_path]) == far


def test_a_directory_that_is_no_run_is_not_searched_to_its_depths(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "train/runs/one/checkpoints/last.ckpt", model)
    with pytest.raises(PolicyError, match="no good checkpoint in the directory"):
        find_checkpoint(str(tmp_path), [])


def test_the_root_of_the_disk_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rglob", lambda *_: pytest.fail("searched"))
    with pytest.raises(PolicyError, match=r"^ckpt_path: no good checkpoint in the directory /$"):
        find_checkpoint("/", [])


@pytest.mark.parametrize("asked", ["a" * 5000, "a/" * 2500])
def test_a_path_that_is_too_long_is_refused_in_a_short_line(asked: str) -> None:
    with pytest.raises(PolicyError) as refused:
        find_checkpoint(asked, [])
    assert str(refused.value).startswith("ckpt_path: a")
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("asked", ["last", "none.ckpt", "."])
def test_where_there_is_none_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError, match=r"^ckpt_path"):
        find_checkpoint(asked, [tmp_path])


def cut(path: Path) -> Path:
    """What is left of a checkpoint that was not written to its end."""
    path.write_bytes(path.read_bytes()[:200])
    return path


def test_a_file_that_is_named_is_meant_itself(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "last.ckpt", model)
    best = save(tmp_path / "best.ckpt", model, age=5)
    assert find_checkpoint(str(best), []) == best


def test_what_a_named_directory_holds_besides_is_told_where_it_is_damaged(
    tmp_path: Path, model: nn.Module
) -> None:
    best = save(tmp_path / "checkpoints/best.ckpt", model, age=5)
    last = cut(save(tmp_path / "checkpoints/last.ckpt", model))
    with pytest.warns(UserWarning, match=rf"^ckpt_path: passed over: {last} is ") as told:
        assert find_checkpoint(str(tmp_path), []) == best
    assert len(told) == 1


def test_each_damaged_checkpoint_is_told_once(tmp_path: Path, model: nn.Module) -> None:
    """Also those of the run's own directory, which lies below that of all runs."""
    good = save(tmp_path / "old/checkpoints/last.ckpt", model, age=100)
    best = cut(save(tmp_path / "own/checkpoints/best.ckpt", model, age=20))
    last = cut(save(tmp_path / "own/checkpoints/last.ckpt", model))
    with pytest.warns(UserWarning, match=rf"^ckpt_path=last means {good}; passed over: {last} is ") as told:
        assert find_checkpoint("last", [tmp_path / "own", tmp_path]) == good
    (line,) = [str(warning.message) for warning in told]
    assert [line.count(str(path)) for path in (best, last)] == [1, 1]
    assert "(2)" not in line


def test_a_run_that_did_not_save_its_last_is_passed_over(tmp_path: Path, model: nn.Module) -> None:
    old = run_of(tmp_path / "train/runs/old", model, started=1.0)
    new = run_of(tmp_path / "train/runs/new", model, started=2.0)
    (new / "checkpoints/last.ckpt").rename(new / "checkpoints/best.ckpt")
    with pytest.warns(UserWarning, match="new, which holds no last"):
        assert find_checkpoint("last", [tmp_path]) == old / "checkpoints/last.ckpt"


def test_where_nothing_good_is_left_it_says_what_is_there(tmp_path: Path, model: nn.Module) -> None:
    nothing = f"ckpt_path=last: no good checkpoint below {tmp_path}"
    with pytest.raises(PolicyError) as refused:
        find_checkpoint("last", [tmp_path])
    assert str(refused.value) == nothing
    last = cut(save(tmp_path / "run/last.ckpt", model))
    with pytest.raises(PolicyError, match=rf"^{nothing}; passed over: {last} is "):
        find_checkpoint("last", [tmp_path])


def test_of_the_same_step_the_last_counts_whatever_file_times_say(tmp_path: Path, model: nn.Module) -> None:
    last = save(tmp_path / "last.ckpt", model, age=50)
    save(tmp_path / "best.ckpt", model)
    assert find_checkpoint(str(tmp_path), []) == last


def test_of_the_same_step_and_kind_the_newest_counts(tmp_path: Path, model: nn.Module) -> None:
    new = save(tmp_path / "a.ckpt", model)
    save(tmp_path / "b.ckpt", model, age=50)
    assert find_checkpoint(str(tmp_path), []) == new


@pytest.mark.parametrize("mark", ["config.yaml", ".hydra", "run.json"])
def test_what_marks_a_run_holds_together_what_lies_below_it(
    tmp_path: Path, model: nn.Module, mark: str
) -> None:
    save(tmp_path / "old/checkpoints/last.ckpt", model, age=100)
    best = save(tmp_path / "new/best.ckpt", model, age=20)
    cut(save(tmp_path / "new/version_0/checkpoints/last.ckpt", model))
    (tmp_path / "new" / mark).touch()
    with pytest.warns(UserWarning, match="passed over"):
        assert find_checkpoint("last", [tmp_path]) == best
    deep = save(tmp_path / "new/version_1/checkpoints/last.ckpt", model)
    with pytest.warns(UserWarning, match="passed over"):
        assert find_checkpoint(str(tmp_path / "new"), []) == deep


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_directory_of_shards_that_was_not_finished_is_passed_over(tmp_path: Path, model: nn.Module) -> None:
    good = save(tmp_path / "a.ckpt", model)
    save_whole({"state_dict": model.state_dict()}, {"global_step": 3}, tmp_path / "last.ckpt")
    assert find_checkpoint(str(tmp_path), []) == tmp_path / "last.ckpt"
    (tmp_path / "last.ckpt" / MARKER).unlink()
    with pytest.warns(UserWarning, match=r"passed over: .*last\.ckpt was not finished$"):
        assert find_checkpoint(str(tmp_path), []) == good


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("lats.ckpt", "did you mean 'last.ckpt'?"),
        ("absent/last.ckpt", "absent either; ckpt_path=last finds the newest"),
        ("empty/last.ckpt", "does not exist; ckpt_path=last finds the newest"),
    ],
)
def test_a_path_that_does_not_exist_is_answered_with_what_is_near(
    tmp_path: Path, model: nn.Module, asked: str, hint: str
) -> None:
    save(tmp_path / "last.ckpt", model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PolicyError) as refused:
        find_checkpoint(str(tmp_path / asked), [])
    assert str(refused.value).startswith(f"ckpt_path: {tmp_path / asked} does not exist; ")
    assert str(refused.value).endswith(hint)


def test_a_pipe_or_device_is_refused_or_passed_over(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(PolicyError, match=r"^ckpt_path: /dev/zero is neither a file nor a directory$"):
        find_checkpoint("/dev/zero", [])
    good = save(tmp_path / "run/checkpoints/good.ckpt", model)
    os.mkfifo(good.with_name("last.ckpt"))
    with pytest.warns(match=r"last.ckpt is neither a file nor a directory"):
        assert find_checkpoint(str(good.parent), []) == good


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pipe_among_the_shards_of_a_checkpoint_is_refused(tmp_path: Path, model: nn.Module) -> None:
    save_whole({"state_dict": model.state_dict()}, {"global_step": 3}, tmp_path / "last.ckpt")
    os.mkfifo(tmp_path / "last.ckpt/more.distcp")
    with pytest.raises(PolicyError, match=r"more.distcp is neither a file nor a directory$"):
        read_checkpoint(tmp_path / "last.ckpt")
