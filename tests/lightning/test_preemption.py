import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from process_pool import ProcessPool

from gradpolicy import PolicyError
from gradpolicy.distributed.agreement import of_every_rank
from gradpolicy.lightning.preemption import SaveOnPreemption, requeue_slurm_job

PROGRAM = Path(__file__).parent / "training_program.py"


class Signal(Callback):
    """Sends this process a signal in the middle of the third step."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def on_before_optimizer_step(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_after_the_step_and_exits_with_its_number(
    train, tmp_path: Path, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    saving = ModelCheckpoint(dirpath=tmp_path)
    with pytest.raises(SystemExit) as ended:
        train(saving, SaveOnPreemption(), Signal(number), max_steps=9, enable_checkpointing=True)
    assert ended.value.code == 128 + number
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
    assert signal.getsignal(number) == before


def test_a_signal_of_a_former_fit_does_not_end_the_next(train) -> None:
    saving = SaveOnPreemption()
    with pytest.raises(SystemExit):
        train(saving, Signal(signal.SIGTERM), enable_checkpointing=True, max_steps=9)
    assert train(saving, enable_checkpointing=True, max_steps=3).global_step == 3


def rank_of(rank: int, launcher: str | None, folder: Path) -> Any:
    """A trainer on one rank of a job."""
    return SimpleNamespace(
        world_size=1,
        global_rank=rank,
        is_global_zero=rank == 0,
        strategy=SimpleNamespace(
            launcher=launcher, reduce_boolean_decision=lambda decision, all: any(of_every_rank(decision))
        ),
        callbacks=[],
        default_root_dir=folder,
        save_checkpoint=lambda path: Path(path).touch(),
    )


def interrupted(trainer: Any, saving: SaveOnPreemption) -> int:
    """The code with which a rank exits after a signal."""
    module = LightningModule()
    saving.on_train_start(trainer, module)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            saving.on_train_batch_end(trainer, module, None, None, 0)
    finally:
        saving.on_train_end(trainer, module)
    return int(ended.value.code)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "launcher", "code"), [(0, "lightning", 143), (1, None, 143), (1, "lightning", 0)]
)
def test_a_rank_that_lightning_launched_exits_without_an_error(
    tmp_path: Path, rank: int, launcher: str | None, code: int
) -> None:
    """Lightning kills the whole job as soon as such a rank ends with one."""
    trainer = rank_of(rank, launcher, tmp_path)
    assert interrupted(trainer, SaveOnPreemption(["SIGTERM"])) == code
    assert (tmp_path / "last.ckpt").exists()


def test_a_run_that_ends_leaves_signals_as_it_found_them(two_layers, make_trainer, train) -> None:
    saving, before = SaveOnPreemption(["SIGUSR1"]), signal.getsignal(signal.SIGUSR1)
    train(saving, enable_checkpointing=True)
    assert signal.getsignal(signal.SIGUSR1) == before
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        saving.on_exception(make_trainer(), two_layers, RuntimeError("of a later stage"))
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        saving.on_train_start(make_trainer(), two_layers)
        assert signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN
        saving.on_exception(make_trainer(), two_layers, RuntimeError("of this stage"))
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("rank", "requeue", "told"), [(0, True, "requeue 4711\n"), (0, False, ""), (1, True, "")]
)
def test_one_rank_puts_the_job_back_unless_that_is_not_wanted(
    slurm, tmp_path: Path, capsys: pytest.CaptureFixture, rank: int, requeue: bool, told: str
) -> None:
    interrupted(rank_of(rank, None, tmp_path), SaveOnPreemption(requeue=requeue))
    assert slurm() == told
    line = f"SIGTERM: saved {tmp_path / 'last.ckpt'}\n"
    assert capsys.readouterr().err == (line if rank == 0 else "")


def signalled(folder: str) -> tuple[Any, int]:
    """Code and batch with which a rank exits where the second of two gets a signal in the third batch."""
    trainer, saving = rank_of(dist.get_rank(), None, Path(folder)), SaveOnPreemption()
    module = LightningModule()
    trainer.world_size = dist.get_world_size()
    saving.on_train_start(trainer, module)
    try:
        for batch in range(6):
            if batch == 2 and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            saving.on_train_batch_end(trainer, module, None, None, batch)
    except SystemExit as ended:
        return ended.code, batch
    finally:
        saving.on_train_end(trainer, module)
    return None, batch


def test_a_signal_to_one_rank_ends_all_of_them_after_the_same_batch(
    pair: ProcessPool, tmp_path: Path
) -> None:
    assert pair(signalled, str(tmp_path)) == [(143, 2), (143, 2)]
    assert (tmp_path / "last.ckpt").exists()


class Final(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "final"


@pytest.mark.parametrize(
    ("folders", "path"),
    [([], "last.ckpt"), ([None], "final.ckpt"), ([None, "kept", "other"], "kept/final.ckpt")],
)
def test_it_is_saved_where_the_run_keeps_its_last_checkpoint(
    tmp_path: Path, folders: list[str | None], path: str
) -> None:
    trainer = rank_of(0, None, tmp_path)
    trainer.callbacks = [Final(dirpath=folder and tmp_path / folder) for folder in folders]
    (tmp_path / "kept").mkdir()
    interrupted(trainer, SaveOnPreemption(requeue=False))
    assert (tmp_path / path).exists()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """What the scontrol of a Slurm job was told."""
    told = tmp_path / "told"
    told.touch()
    program = tmp_path / "scontrol"
    refusal = '[ -z "$REFUSES" ] || { echo "$REFUSES" >&2; exit 1; }'
    program.write_text(f'#!/bin/sh\necho "$@" >> {told}\n{refusal}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    return told.read_text


def test_an_unknown_signal_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"'SIGUSR1'"):
        SaveOnPreemption(["SIGUSR"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_job_told_to_go_resumes_where_it_was(tmp_path: Path, slurm: Callable[[], str], ranks: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[2]), "OMP_NUM_THREADS": "1"}
    # Only the requeueing is Slurm's here; without these Lightning would take its own launcher for srun.
    environment |= {"SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "1"}
    command = [sys.executable, str(PROGRAM), str(tmp_path / "run"), ranks]
    with subprocess.Popen(
        [*command, "10000000", "announce"], stdout=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stdout is not None
        next(line for line in running.stdout if line.startswith("pid"))
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 128 + signal.SIGTERM
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert saved >= 3
    assert slurm() == "requeue 4711\n"
    del environment["SLURM_JOB_ID"]
    resumed = subprocess.run(
        [*command, str(saved + 2)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert f"finished at step {saved + 2}" in resumed.stdout


ARRAY = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "11"}
NOT_BACK = "job 4711 is not put back into the queue"


@pytest.mark.parametrize(
    ("environment", "asked", "told"),
    [
        ({}, "requeue 4711\n", "job 4711 is back in the queue"),
        (ARRAY, "requeue 4700_11\n", "job 4700_11 is back"),
        ({"REFUSES": "not allowed"}, "requeue 4711\n", f"{NOT_BACK}: not allowed"),
        ({"PATH": ""}, "", f"{NOT_BACK}: there is no scontrol here"),
        ({"SLURM_JOB_ID": None}, "", ""),
    ],
    ids=["a job", "a task of an array", "a job that is refused", "no scontrol", "no Slurm"],
)
@pytest.mark.filterwarnings("always")
def test_what_became_of_a_job_is_told(
    slurm: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
    environment: dict[str, str | None],
    asked: str,
    told: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO):
        requeue_slurm_job()
    assert slurm() == asked
    lines = [*(str(warning.message) for warning in recwarn), caplog.text]
    assert any(told in line for line in lines)
    assert any("Slurm job" in line for line in lines) == bool(told)
