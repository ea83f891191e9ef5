"""One directory for all processes of a run, and none for a run that never began."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from gradpolicy.app.run_directory import LOCK, locked
from gradpolicy.errors import PolicyError


@contextmanager
def claimed(template: str | Path) -> Iterator[Path]:
    """Locks the directory that a config names."""
    node = OmegaConf.create({"run": {"dir": str(template)}}).run
    with locked(Path(node.dir), "hydra.run.dir") as directory:
        directory.started = True
        yield directory.path


def fail(path: Path, error: Exception, started: bool = False) -> None:
    with locked(path, "hydra.run.dir") as directory:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".hydra").mkdir()
        (path / "train.log").touch()
        (path / "half.txt").touch()
        if started:
            directory.started = True
        raise error


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    path = tmp_path / "outputs/train/run"
    path.mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    ("before", "rank", "error", "started"),
    [
        ({}, 0, PolicyError("wrong"), True),
        ({}, 0, ArithmeticError(), False),
        ({"config.yaml": ""}, 0, PolicyError("wrong"), False),
        ({"train.log": "epoch 1\n"}, 0, PolicyError("wrong"), False),
        ({}, 1, PolicyError("wrong"), False),
    ],
    ids=["it began", "no wrong input", "a run was there", "a log was there", "another rank"],
)
def test_what_was_written_stays_where(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, before: dict, rank: int, error: Exception, started: bool
) -> None:
    for name, text in before.items():
        (fresh / name).write_text(text)
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    with pytest.raises(type(error)):
        fail(fresh, error, started)
    assert (fresh / "half.txt").exists()
    assert {name: (fresh / name).read_text() for name in before} == before


@pytest.mark.parametrize("words", [("hydra.run.dir=mine",), ("-m", "seed=1,2", "hydra.sweep.dir=mine")])
def test_a_plan_leaves_nothing_behind(train, tmp_path: Path, words: tuple[str, ...]) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").touch()
    train("plan_only=true", *(word.replace("mine", str(mine)) for word in words)).completed  # noqa: B018
    assert [path.name for path in mine.rglob("*")] == ["notes.txt"]


HOLDER = """
import sys, time
from pathlib import Path
from gradpolicy.app.run_directory import locked
with locked(Path(sys.argv[1]), "hydra.run.dir"):
    print("locked", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process that runs in the directory `taken`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "taken")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_a_directory_in_which_another_process_runs_is_refused_until_it_was_killed(
    tmp_path: Path, holder: subprocess.Popen
) -> None:
    taken = tmp_path / "taken"
    refusal = rf"^hydra\.run\.dir: another process runs in {taken}; wait until it ends"
    with pytest.raises(PolicyError, match=refusal), claimed(taken):
        pass
    assert [path.name for path in taken.iterdir()] == [LOCK]
    holder.kill()
    holder.wait()
    with claimed(taken) as directory:
        (directory / "file").touch()
    assert [path.name for path in taken.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_lock_that_is_something_else_is_left_alone(tmp_path: Path, kind: str) -> None:
    precious, lock = tmp_path / "precious", tmp_path / "run" / LOCK
    precious.write_text("mine")
    lock.parent.mkdir()
    if kind == "link":
        lock.symlink_to(precious)
    else:
        lock.write_text("mine")
    with (
        pytest.raises(PolicyError, match=r"^hydra\.run\.dir: .*/\.lock is no lock of a run"),
        claimed(lock.parent),
    ):
        pass
    assert precious.read_text() == "mine"
    assert lock.exists()


def test_a_directory_is_locked_while_a_run_is_in_it_and_its_other_ranks_run_beside_it(
    tmp_path: Path, holder: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    with claimed(tmp_path / "own") as own:
        assert (own / LOCK).is_file()
    assert not own.exists()
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with claimed(tmp_path / "taken") as directory:
        assert directory == tmp_path / "taken"


def test_a_requeued_slurm_job_finds_its_directory_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with claimed(f"{tmp_path}/${{started:}}") as directory:
            directory.mkdir(exist_ok=True)
            (directory / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["slurm-17-0"]
