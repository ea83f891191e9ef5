"""SIGTERM ends a run in good order, whatever it is doing."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gradpolicy.launch.run import RunBegins
from gradpolicy.launch.signals import termination_exits

from .conftest import QUICK, ROOT


def told_to_go(closed: list[bool]) -> None:
    with termination_exits():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            closed.append(True)


def test_outside_of_training_it_unwinds_and_exits_with_143() -> None:
    closed: list[bool] = []
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as leaving:
        told_to_go(closed)
    assert leaving.value.code == 143
    assert closed == [True]
    assert signal.getsignal(signal.SIGTERM) is former


def test_ctrl_c_in_training_is_told_in_one_line(train, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunBegins, "on_train_batch_end", interrupt)
    # Handlers that earlier tests have left write to streams that are closed.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler = signal.getsignal(signal.SIGINT)
    try:
        ended = train()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended.code == 130
    assert ended.err == "interrupted; ckpt_path=last goes on from the newest checkpoint\n"


@pytest.mark.parametrize("trainer", ["cpu", pytest.param("ddp_sim", marks=pytest.mark.slow)])
def test_in_training_it_saves_a_checkpoint_from_which_the_run_goes_on(
    tmp_path: Path, train, trainer: str
) -> None:
    endless = [line for line in QUICK if "max_epochs" not in line and "limit_train" not in line]
    process = subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "train.py"), f"paths.log_dir={tmp_path}", *endless),
            f"trainer={trainer}",
            "trainer.max_epochs=1000",
            "trainer.log_every_n_steps=1",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("train/runs/*/checkpoints/best.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    (run,) = tmp_path.glob("train/runs/*")
    last = run / "checkpoints/last.ckpt"
    assert f"SIGTERM: saved {last}" in err
    step = torch.load(last, weights_only=True)["global_step"]
    assert step > 0
    resumed = train(
        f"ckpt_path={last}",
        f"trainer={trainer}",
        f"trainer.max_steps={step + 2}",
        "trainer.max_epochs=-1",
        "trainer.limit_train_batches=null",
    )
    assert resumed.code == 0
    last = torch.load(resumed.run / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == step + 2
