import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import LightningModule

from gradpolicy.errors import PolicyError
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


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rank-watch"]


def end(watch: RankWatch) -> None:
    """Ends a watch, and waits until its thread has ended too."""
    watch.teardown(None, LightningModule(), "fit")  # type: ignore[arg-type]
    for thread in watchers():
        thread.join(5)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankWatch, dist.HashStore, list[int]]]:
    """The watch of rank 0 of 2, the store that the ranks share, and what would have ended the process."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(rank_watch, "_GRACE", 0.05)
    store, watch = dist.HashStore(), RankWatch(every=0.02)
    # What is not there is not waited for.
    store.set_timeout(timedelta(seconds=1))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    trainer: Any = SimpleNamespace(world_size=2, global_rank=0, strategy=SimpleNamespace(launcher=None))
    watch.setup(trainer, LightningModule(), "fit")
    yield watch, dist.distributed_c10d._get_default_store(), ended
    end(watch)
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
    assert describe_exit(0) == "exit code 0"
    assert describe_exit(-15) == "killed by SIGTERM"
    assert describe_exit(-9) == "killed by SIGKILL (out of memory?)"


@pytest.mark.parametrize("every", [0, -1.0, float("inf"), float("nan")])
def test_a_time_between_checks_that_never_ends_or_is_none_is_refused(every: float) -> None:
    with pytest.raises(PolicyError, match=r"^RankWatch\.every: must be a number of seconds above 0, got"):
        RankWatch(every)


def test_one_thread_watches_from_setup_to_teardown_and_again_in_the_next_stage(watched) -> None:
    watch, store, ended = watched
    trainer: Any = SimpleNamespace(world_size=2, global_rank=0, strategy=SimpleNamespace(launcher=None))
    watch.setup(trainer, LightningModule(), "test")
    (thread,) = watchers()
    assert thread.daemon, "it keeps no process from ending"
    end(watch)
    assert watchers() == []
    watch.setup(trainer, LightningModule(), "test")
    store.set("gradpolicy/died/1", "ArithmeticError: theirs")
    time.sleep(0.3)
    assert ended


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_watched_on_one_rank_or_without_a_process_group(ranks: int) -> None:
    trainer: Any = SimpleNamespace(world_size=ranks, global_rank=0, strategy=SimpleNamespace(launcher=None))
    watch = RankWatch()
    watch.setup(trainer, LightningModule(), "fit")
    assert watchers() == []
    fail(watch, ArithmeticError("on purpose"))


@pytest.mark.parametrize(
    "broken", [RuntimeError("Connection closed by peer"), dist.DistError("of any other words")]
)
def test_a_collective_that_another_ranks_death_broke_is_put_down_to_that_death(
    watched, capfd, broken: Exception
) -> None:
    watch, store, ended = watched
    watch._over.set()
    time.sleep(0.1)
    store.set("gradpolicy/died/1", "ArithmeticError: theirs")
    fail(watch, broken)
    assert ended
    told = capfd.readouterr().err
    assert str(broken) in told
    assert "[rank 0] rank 1 died: ArithmeticError: theirs; ending the job" in told


def test_a_broken_connection_whose_cause_never_comes_is_told_to_the_others(watched) -> None:
    watch, store, ended = watched
    began = time.monotonic()
    fail(watch, RuntimeError("Connection closed by peer"))
    assert store.get("gradpolicy/died/0") == b"RuntimeError: Connection closed by peer"
    assert ended == []
    assert time.monotonic() - began >= 0.05, "it waits a while for the cause"


def test_an_error_of_a_ranks_own_is_told_at_once(watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "_GRACE", 30.0)
    watch, store, ended = watched
    store.set("gradpolicy/died/1", "ArithmeticError: theirs")
    fail(watch, ArithmeticError("mine"))
    assert store.get("gradpolicy/died/0") == b"ArithmeticError: mine"
    assert ended == []


def test_the_death_of_the_process_that_launched_this_one_ends_it(
    watched, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    _, _, ended = watched
    monkeypatch.setattr(os, "getppid", lambda: 1)
    time.sleep(0.3)
    assert set(ended) == {1}
    line = "[rank 0] the process that launched this rank died: rank 0, or torchrun; ending the job"
    assert line in capfd.readouterr().err


def test_of_a_launched_rank_that_died_the_error_that_it_stored_is_told(watched, capfd) -> None:
    watch, store, _ = watched
    store.set("gradpolicy/died/2", "ArithmeticError: theirs")
    living = SimpleNamespace(pid=7, returncode=None, poll=lambda: None, kill=lambda: None)
    dead = SimpleNamespace(pid=8, returncode=1, poll=lambda: 1, kill=lambda: None)
    watch._children += [living, dead]
    time.sleep(0.3)
    assert "rank 2 (process 8) died: ArithmeticError: theirs; ending" in capfd.readouterr().err


def test_the_launched_ranks_are_those_of_the_strategys_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    dead = SimpleNamespace(pid=8, returncode=3, poll=lambda: 3, kill=lambda: None)
    strategy = SimpleNamespace(launcher=SimpleNamespace(procs=[dead]))
    trainer: Any = SimpleNamespace(world_size=2, global_rank=0, strategy=strategy)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watch = RankWatch(every=0.02)
    try:
        watch.setup(trainer, LightningModule(), "fit")
        time.sleep(0.2)
    finally:
        end(watch)
        dist.destroy_process_group()
    assert ended
