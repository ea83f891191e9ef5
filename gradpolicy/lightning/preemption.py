"""A callback that saves and requeues a Slurm job when it is signalled to stop."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from gradpolicy.errors import unknown
from gradpolicy.lightning.trainer_parts import callbacks_of


class SaveOnPreemption(Checkpoint):
    """Saves a checkpoint and exits after a signal that the machine will be taken away.

    A signal to any rank sets a flag there. At the end of each batch the ranks reduce their flags. If one is
    set, all ranks save ``last.ckpt`` together, from which ``ckpt_path=last`` resumes, a Slurm job is
    requeued, and the run exits with 128 + the signal's number. A checkpoint saved by the signal handler
    itself, in the middle of a step, could not be resumed exactly.

    Args:
        signals: The signals. Slurm sends SIGUSR1 before its time limit if the job requests it
            (``--signal=SIGUSR1@120``), and SIGTERM before it kills the job.
        requeue: Requeue a Slurm job with ``scontrol requeue``.

    Raises:
        PolicyError: For an unknown signal.
    """

    def __init__(self, signals: Iterable[str] = ("SIGTERM", "SIGUSR1"), *, requeue: bool = True) -> None:
        valid = [known.name for known in signal.Signals]
        for name in signals:
            if name not in valid:
                raise unknown("signal", str(name), valid, key="SaveOnPreemption.signals")
        self.signals = tuple(signal.Signals[name] for name in signals)
        self.requeue = requeue
        self._received = 0
        self._former: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's signal handlers, which run collectives in the middle of a step."""
        self._received = 0
        for number in self.signals:
            self._former[number] = signal.signal(number, self._remember)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the original signal handlers."""
        self._restore_handlers()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the original signal handlers."""
        self._restore_handlers()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and exit if any rank received a signal. Callbacks of type Checkpoint run after the others."""
        if not trainer.strategy.reduce_boolean_decision(bool(self._received), all=False):
            return
        received = self._received or self.signals[0]
        path = _path_of_last(trainer)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            print(f"{signal.Signals(received).name}: saved {path}", file=sys.stderr, flush=True)
        if self.requeue and trainer.is_global_zero:
            requeue_slurm_job()
        # If a rank that Lightning launched ends with an error, Lightning kills the job at once.
        launched = trainer.strategy.launcher is not None and trainer.global_rank > 0
        raise SystemExit(0 if launched else 128 + received)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def _restore_handlers(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}


def requeue_slurm_job() -> None:
    """Requeue this process's Slurm job; do nothing outside Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    command = shutil.which("scontrol")
    if command is None:
        rank_zero_warn(f"Slurm job {job} is not put back into the queue: there is no scontrol here")
        return
    done = subprocess.run([command, "requeue", job], capture_output=True, text=True)
    if done.returncode:
        rank_zero_warn(f"Slurm job {job} is not put back into the queue: {done.stderr.strip()}")
    else:
        rank_zero_info(f"Slurm job {job} is back in the queue")


def _path_of_last(trainer: Trainer) -> Path:
    """Return the path from which ``ckpt_path=last`` resumes."""
    kept = callbacks_of(trainer, ModelCheckpoint)
    folder = next((callback.dirpath for callback in kept if callback.dirpath), None)
    name = kept[0].CHECKPOINT_NAME_LAST if kept else "last"
    return Path(folder or trainer.default_root_dir) / f"{name}.ckpt"
