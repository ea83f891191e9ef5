"""One directory for all processes of a run, and none for a run that never began."""

from pathlib import Path

import pytest

from gradpolicy.errors import PolicyError
from gradpolicy.launch.rundir import empty_directories_removed, run_directory, started


def fail(path: Path, error: Exception, begun: bool = False) -> None:
    with run_directory(path) as directory:
        (path / "half.txt").touch()
        if begun:
            directory.begin()
        raise error


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    path = tmp_path / "outputs/train/run"
    (path / ".hydra").mkdir(parents=True)
    (path / "train.log").touch()
    return path


def test_wrong_input_leaves_nothing_of_a_run_that_never_began(fresh: Path) -> None:
    with pytest.raises(PolicyError):
        fail(fresh, PolicyError("wrong"))
    assert not fresh.exists()


def test_directories_that_were_made_for_a_run_go_where_they_end_up_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with empty_directories_removed(tmp_path / "mine/train/runs/now"):
        (tmp_path / "mine/train/runs/now").mkdir(parents=True)
    assert list((tmp_path / "mine").iterdir()) == []
    with empty_directories_removed(tmp_path / "mine/train/runs/now"):
        (tmp_path / "mine/train/other").mkdir(parents=True)
    assert list((tmp_path / "mine/train").iterdir()) == [tmp_path / "mine/train/other"]


def test_a_run_that_began_stays(fresh: Path) -> None:
    with pytest.raises(PolicyError):
        fail(fresh, PolicyError("wrong"), begun=True)
    assert (fresh / "half.txt").exists()


def test_a_failure_that_is_no_wrong_input_stays_to_be_looked_at(fresh: Path) -> None:
    with pytest.raises(ArithmeticError):
        fail(fresh, ArithmeticError())
    assert (fresh / "half.txt").exists()


def test_a_directory_that_held_something_stays(fresh: Path) -> None:
    (fresh / "config.yaml").touch()
    with pytest.raises(PolicyError):
        fail(fresh, PolicyError("wrong"))
    assert (fresh / "config.yaml").exists()


def test_under_srun_all_processes_say_the_same_and_so_does_the_requeued_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert started() == "slurm-17-0"
