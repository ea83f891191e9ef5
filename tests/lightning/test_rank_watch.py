import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import LightningModule

from gradpolicy.lightning import rank_watch
from gradpolicy.lightning.rank_watch import RankWatch, describe_exit

PROGRAM = Path(__file__).parent / "training_program.py"


def run(folder: Path, *arguments: str) -> tuple[int, str, float]:
    """Exit code, stderr and seconds of the training program."""
    root = PROGRAM.parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    return done.returncode, done.stderr, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("killed", "died: killed by SIGKILL (out of memory?); ending the job"),
        ("raises", "died: ArithmeticError: on purpose; ending the job"),
    ],
)
def test_a_dead_rank_ends_the_job_with_its_number_and_cause(tmp_path: Path, fault: str, told: str) -> None:
    code, errors, seconds = run(tmp_path, "2", "1000000", fault)
    assert code == 1
    assert "[rank 0] rank 1 " in errors
    assert told in errors
    assert seconds < 60


@pytest.mark.slow
def test_the_death_of_the_first_rank_ends_the_others(tmp_path: Path) -> None:
    _, errors, seconds = run(tmp_path, "2", "1000000", "first_killed")
    assert "[rank 1] the process that launched this rank died: rank 0, or torchrun; ending the job" in errors
    assert seconds < 60


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankWatch, dist.HashStore, list[int]]]:
    """The watch of rank 0 of 2, the store that the ranks share, and what would have ended the process."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(rank_watch, "_GRACE", 0.05)
    store, watch = dist.HashStore(), RankWatch(every=0.02)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    trainer: Any = SimpleNamespace(world_size=2, global_rank=0, strategy=SimpleNamespace(launcher=None))
    watch.setup(trainer, LightningModule(), "fit")
    yield watch, dist.distributed_c10d._get_default_store(), ended
    watch.teardown(trainer, LightningModule(), "fit")
    dist.destroy_process_group()


def fail(watch: RankWatch, error: BaseException) -> None:
    watch.on_exception(None, None, error)  # type: ignore[arg-type]
    time.sleep(0.3)


def test_a_rank_does_not_take_its_own_error_for_that_of_another(watched, capfd) -> None:
    watch, store, ended = watched
    fail(watch, ArithmeticError("mine"))
    assert store.get("gradpolicy/died/0") == b"ArithmeticError: mine"
    assert ended == []
    store.set("gradpolicy/died/1", "ArithmeticError: theirs")
    time.sleep(0.3)
    assert ended
    assert "[rank 0] rank 1 died: ArithmeticError: theirs; ending the job" in capfd.readouterr().err


@pytest.mark.parametrize("leaving", [SystemExit(143), KeyboardInterrupt()])
def test_a_rank_that_leaves_in_good_order_is_no_death_and_stops_watching(watched, leaving) -> None:
    watch, store, ended = watched
    fail(watch, leaving)
    assert not store.check(["gradpolicy/died/0"])
    store.set("gradpolicy/died/1", "ArithmeticError: theirs")
    time.sleep(0.3)
    assert ended == []


def test_while_the_other_ranks_live_nothing_ends(watched, capfd) -> None:
    watch, _, ended = watched
    killed: list[bool] = []
    child = SimpleNamespace(pid=7, returncode=None, poll=lambda: child.returncode)
    child.kill = lambda: killed.append(True)
    watch._children.append(child)
    time.sleep(0.2)
    assert ended == []
    child.returncode = -15
    time.sleep(0.2)
    assert ended
    assert killed
    assert "rank 1 (process 7) died: killed by SIGTERM; ending the job" in capfd.readouterr().err


def test_exit_codes_are_told_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-15) == "killed by SIGTERM"
