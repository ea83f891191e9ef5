"""Several processes: one run directory, and each rank with its own job's arguments; and what signals do."""

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gradpolicy.app.processes import exit_with_ranks, termination_exits
from gradpolicy.app.run import RunBegins
from tests.app.own_callbacks import chosen

from .conftest import CONF, QUICK, ROOT, start, stop_when

PROBE = chosen("Probe", directory="${paths.output_dir}")


def said(run: Path) -> list[list[dict]]:
    """What each rank wrote, a list of lines a rank."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(run.glob("rank*.jsonl"))
    ]


@pytest.mark.slow
def test_in_a_sweep_each_rank_trains_its_own_job_once(train_process, tmp_path: Path) -> None:
    mine = shutil.copytree(CONF, tmp_path / "conf")
    (mine / "policy/mine.yaml").write_text("cut: {_target_: gradpolicy.Stop, modules: model.probe}\n")
    configs = ("--config-path", str(mine), "policy=mine")
    ended = train_process(*configs, "-m", "optimizer.lr=0.001,0.002", "trainer=ddp_sim", *PROBE).completed
    (sweep,) = ended.folder.glob("train/sweeps/*")
    for job, rate in (("0", 0.001), ("1", 0.002)):
        assert said(sweep / job) == [[{"rank": rank, "lr": rate}] for rank in (0, 1)]
        assert len(list((sweep / job).glob("csv/*/metrics.csv"))) == 1
    assert not list(ended.folder.glob("train/runs/*"))


@pytest.mark.slow
def test_torchrun_writes_one_run_directory(train_process) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = train_process("trainer=ddp_sim", *PROBE, launcher=torchrun).completed
    assert [lines[0]["rank"] for lines in said(ended.run)] == [0, 1]
    assert (ended.run / "checkpoints/last.ckpt").is_file()


# ---- signals


def told_to_go(closed: list[bool]) -> None:
    with termination_exits():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            closed.append(True)


def test_sigterm_unwinds_and_exits_with_143() -> None:
    closed: list[bool] = []
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as leaving:
        told_to_go(closed)
    assert leaving.value.code == 143
    assert closed == [True]
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.fixture
def stop_after_a_batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BaseException], None]]:
    """Ends training by an exception after its first batch, as a signal does."""
    begins = RunBegins.on_train_batch_end

    def stop(reason: BaseException) -> None:
        def after_a_batch(*arguments: Any) -> None:
            begins(*arguments)
            raise reason

        monkeypatch.setattr(RunBegins, "on_train_batch_end", after_a_batch)

    # Handlers that earlier tests have left write to streams that are closed.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler = signal.getsignal(signal.SIGINT)
    yield stop
    # Lightning ignores the signal from then on.
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    ("reason", "code", "said"),
    [(KeyboardInterrupt(), 130, "interrupted"), (SystemExit(143), 143, "ended by SIGTERM")],
)
def test_a_run_that_is_stopped_says_so_in_one_line_and_in_its_report(
    train, stop_after_a_batch, reason: BaseException, code: int, said: str
) -> None:
    stop_after_a_batch(reason)
    ended = train("extras.report=true")
    assert ended.code == code
    assert ended.err == f"{said}; ckpt_path=last goes on from the last checkpoint\n"
    assert (ended.result.status, ended.result.error) == ("stopped", "stopped before its end")
    assert '<span class="chip bad">stopped</span>' in (ended.run / "report.html").read_text()


def test_sigterm_reaches_the_other_ranks_before_the_run_ends() -> None:
    launcher, handler = Mock(), signal.getsignal(signal.SIGTERM)
    try:
        exit_with_ranks(launcher)
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, handler)
    launcher.kill.assert_called_once_with(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["cpu", pytest.param("ddp_sim", marks=pytest.mark.slow)])
def test_a_run_ended_by_sigterm_goes_on_from_its_last_checkpoint(tmp_path: Path, train, trainer: str) -> None:
    endless = [line for line in QUICK if "max_epochs" not in line and "limit_train" not in line]
    settings = (f"trainer={trainer}", "trainer.max_epochs=1000", "trainer.log_every_n_steps=1")
    process = start(tmp_path, f"{ROOT}/train.py", f"paths.log_dir={tmp_path}", *endless, *settings)
    saved = "train/runs/*/checkpoints/last.ckpt"
    ended = stop_when(process, lambda: any(tmp_path.glob(saved)), signal.SIGTERM, tmp_path)
    assert ended.code == 143, ended.err
    last = ended.run / "checkpoints/last.ckpt"
    step = torch.load(last, weights_only=True)["global_step"]
    assert step > 0
    assert train(
        f"ckpt_path={last}",
        f"trainer={trainer}",
        f"trainer.max_steps={step + 2}",
        "trainer.max_epochs=-1",
        "trainer.limit_train_batches=null",
    ).completed
    assert torch.load(last, weights_only=True)["global_step"] == step + 2
