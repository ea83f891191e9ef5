"""Exact resume: all that uses private parts of Lightning, as read in version 2.6.6.

Some checkpoints are written after a batch but before its validation, its log row and its counters; others
after a validation but before the schedulers step. When it resumes, Lightning derives from its counters what
was already done. After the last batch of an epoch this is wrong: it skips the validation, the hooks at the
end of the epoch, and the count of epochs. This module saves the position within the loops, so that the loops
continue from there.
"""

import csv
import os
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars, move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.distributed.agreement import of_every_rank
from gradpolicy.errors import PolicyError, brief, shortened
from gradpolicy.lightning.callback import GradientPolicies
from gradpolicy.lightning.checkpoints import CANNOT_RESUME, KEY, PATHS, check_checkpoint
from gradpolicy.lightning.runs import OwnCheckpoints, cut_checkpoints, own_checkpoints, run_of, step_of
from gradpolicy.lightning.trainer_parts import callbacks_of
from gradpolicy.tensors.sharding import local_shard
from gradpolicy.where import plain_name
from gradpolicy.whole_file import is_inside, written_whole

COUNTED = ("optimizer_states", "lr_schedulers")
# Optimizer.__setstate__ adds this default, which some optimizers, such as Muon, do not have.
ADDED_DEFAULT = "differentiable"
# The hooks in which a checkpoint is written: `on_train_batch_end`, `on_validation_end`, `on_train_epoch_end`.
BATCH, VALIDATION, EPOCH = "batch", "validation", "epoch"
# In other hooks, or after an exception, Lightning's own behaviour is used.
ELSEWHERE = "elsewhere"


class ExactResume(Callback):
    """Saves and restores the state that an exact resume needs and Lightning does not save.

    - the global random states (Python, NumPy, torch, the CUDA device) of every rank;
    - within an accumulation window, the gradients that every rank has accumulated;
    - the position of every rank's data loader, if the loader has one;
    - the position in Lightning's loops;
    - the values that were about to be logged;
    - a flag that early stopping had ended the run.

    If the data module is one of :mod:`gradpolicy.tasks` or its loader saves its position, and the optimizer
    restores its state, then a run that was killed at any moment and resumed from its last checkpoint ends
    with the same bits as an uninterrupted run. Everything saved loads with ``weights_only=True``.

    Args:
        directory: The directory of the run, whose record lists the checkpoints that it writes. If the
            checkpoint is one of them, the run continues there: its log rows and checkpoints of later steps
            are deleted before training. Otherwise a new run starts from the checkpoint, with new best scores
            and early stopping. None leaves both to Lightning.
    """

    KEY = "gradpolicy_exact_resume"

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = None if directory is None else Path(directory)
        self._restored: list[dict[str, Any]] = []
        self._loops: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._step = 0
        self._max_steps = -1
        self._ended_epoch: dict[str, Any] = {}

    def goes_on(self, trainer: Trainer) -> bool:
        """Return True if the checkpoint that is resumed is one of this run."""
        if self.directory is None or trainer.ckpt_path is None:
            return False
        run = run_of(Path(str(trainer.ckpt_path)))
        return run is not None and run.resolve() == self.directory.resolve()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """List the checkpoints that are written from now on."""
        writer = trainer.strategy.checkpoint_io
        if self.directory is not None and not isinstance(writer, OwnCheckpoints):
            trainer.strategy.checkpoint_io = OwnCheckpoints(writer, self.directory)

    # ---- saving

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state of every rank; Lightning calls this on all of them."""
        now = moment(trainer)
        state = {
            "random": random_states(pl_module.device),
            "moment": now,
            "should_stop": trainer.should_stop,
            "metrics": move_data_to_device(dict(trainer.callback_metrics), "cpu"),
            "row": _pending_row(trainer, now),
            "ended_epoch": self._ended_epoch or _ended_epoch(trainer, now),
            "rows": [_count_rows(logger) for logger in _csv_loggers(trainer)],
            "loaders": checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader"),
            "deferred": {key: each._defer_save_until_validation for key, each in _kept(trainer).items()},
        }
        if trainer.fit_loop.epoch_loop._should_accumulate():
            state["gradients"] = {
                plain_name(name): local_shard(parameter.grad).cpu()
                for name, parameter in pl_module.named_parameters()
                if parameter.grad is not None
            }
        checkpoint[self.KEY] = of_every_rank(state)

    # ---- restoring

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store the state until training starts, and insert this rank's state of the loaders."""
        states = checkpoint["callbacks"]
        if trainer.state.fn is not TrainerFn.FITTING:
            # A test must not change the best checkpoint.
            for key in _kept(trainer):
                states.pop(key, None)
            return
        self._step = checkpoint["global_step"]
        # In a sharded checkpoint they are in its shards.
        self._counts = {name: len(checkpoint[name]) for name in COUNTED if name in checkpoint}
        self._restored = checkpoint.get(self.KEY, [])
        self._loops = checkpoint["loops"]["fit_loop"]
        if len(self._restored) == trainer.world_size:
            loaders = self._restored[trainer.global_rank].get("loaders")
            if loaders is not None:
                self._loops["state_dict"]["combined_loader"] = loaders
        if self.goes_on(trainer):
            self._restore_best(trainer, states)
        elif self.directory is not None:
            for key in (*_kept(trainer), *_stoppers(trainer)):
                states.pop(key, None)

    def _restore_best(self, trainer: Trainer, states: dict[str, Any]) -> None:
        """Update each ModelCheckpoint's state by the checkpoints in the directory; all ranks call this."""
        kept = {
            key: each
            for key, each in _kept(trainer).items()
            if key in states and "://" not in f"{each.dirpath}{states[key]['dirpath']}"
        }
        here: dict[str, Any] = {}
        if trainer.is_global_zero:
            assert self.directory is not None
            for key, each in kept.items():
                here[key] = _state_here(states[key], each, self._step, self.directory)
        states.update(trainer.strategy.broadcast(here))
        deferred = self._restored[0].get("deferred", {}) if self._restored else {}
        for key, callback in kept.items():
            # Lightning saves the score, but does not restore it.
            callback.current_score = states[key].get("current_score")
            callback._defer_save_until_validation = deferred.get(key, False)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Complete the epoch of a run that has taken its last step."""
        self._max_steps = trainer.max_steps
        if self._restored and self._restored[0]["moment"] in (BATCH, VALIDATION):
            trainer.fit_loop.epoch_loop.max_steps = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore this rank's state, after all other hooks that run before the first batch.

        Raises:
            PolicyError: For a checkpoint of another optimizer, or of another number of them. Lightning
                restores as many states as there are and ignores the rest.
        """
        counts, self._counts = self._counts, {}
        needed = (len(trainer.optimizers), len(trainer.lr_scheduler_configs))
        for name, number in zip(COUNTED, needed, strict=True):
            if counts.get(name, number) != number:
                raise PolicyError(
                    f"{KEY}: {trainer.ckpt_path} holds {counts[name]} {name}, and this run needs {number}:"
                    f" {CANNOT_RESUME}"
                )
        for optimizer in trainer.optimizers:
            # DeepSpeed's optimizer has no defaults, and checks this by itself.
            settings = getattr(optimizer, "defaults", {}).keys() - {ADDED_DEFAULT}
            lacking = settings - optimizer.param_groups[0].keys()
            if lacking:
                raise PolicyError(
                    f"{KEY}: {trainer.ckpt_path} is of another optimizer than this run's, which needs"
                    f" {shortened(sorted(lacking))}: {CANNOT_RESUME}"
                )
        self._cut(trainer)
        saved, self._restored = self._restored, []
        if not saved:
            return
        same_ranks = len(saved) == trainer.world_size
        state = saved[trainer.global_rank if same_ranks else 0]
        stopped = any(each.wait_count >= each.patience for each in _stoppers(trainer).values())
        trainer.should_stop = trainer.should_stop or (state["should_stop"] and stopped)
        _restore_metrics(trainer, state)
        self._ended_epoch = saved[0]["ended_epoch"]
        if same_ranks:
            _restore_rank(pl_module, state)
        else:
            rank_zero_warn(
                f"the checkpoint is of {len(saved)} process(es), resumed by {trainer.world_size}: random"
                " states start anew, and the run will not equal the one left alone bit for bit"
            )
        self._continue(trainer, state)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the averages of an epoch all of whose batches were before the checkpoint."""
        ended, self._ended_epoch = self._ended_epoch, {}
        for name, value in ended.get("callback", {}).items():
            pl_module.log(
                name,
                value.to(pl_module.device),
                logger=name in ended["log"],
                on_step=False,
                on_epoch=True,
                # Reduced by the maximum, since the number is the same on every rank.
                reduce_fx="max",
                sync_dist=True,
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Complete the log and the metrics of a run without remaining steps."""
        if self._restored:
            self._cut(trainer)
            saved, self._restored = self._restored, []
            _restore_metrics(trainer, saved[0])
            _log_row(trainer, saved[0]["row"])

    def _cut(self, trainer: Trainer) -> None:
        """Delete everything that the run has written after the checkpoint."""
        if not self.goes_on(trainer) or not trainer.is_global_zero:
            return
        assert self.directory is not None
        cut_checkpoints(self.directory, self._step)
        rows = self._restored[0]["rows"] if self._restored else []
        for logger, number in zip(_csv_loggers(trainer), rows, strict=False):
            _cut_rows(Path(logger.experiment.metrics_file_path), number)

    def _continue(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Continue the loops from the position at which the checkpoint was saved."""
        saved_in, row = state["moment"], state["row"]
        if saved_in == ELSEWHERE:
            return
        fit = trainer.fit_loop
        fetcher = fit._data_fetcher
        assert fetcher is not None
        # Lightning has changed its own copy of the state since it was saved.
        fit.load_state_dict(self._loops)
        if saved_in == EPOCH:
            _settle(trainer)
            fit.reset_restart_stage()
            if fit.epoch_loop._num_ready_batches_reached():
                fit.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            _log_row(trainer, row)
            fit.epoch_progress.increment_completed()
            return
        epoch_loop, max_steps = fit.epoch_loop, self._max_steps

        def end_batch_instead_of_reset() -> None:
            del epoch_loop.reset
            _settle(trainer)
            epoch_loop.max_steps = max_steps
            if saved_in == BATCH:
                epoch_loop.batch_progress.increment_completed()
                _log_row(trainer, row)
            else:
                epoch_loop._skip_next_val = True
            # Epoch averages are reset at the first batch of an epoch, which the next batch is not.
            trainer._logger_connector._first_loop_iter = True
            epoch_loop.on_advance_end(fetcher)

        # Within an epoch, there are no hooks between those of the start and the next batch.
        epoch_loop.reset = end_batch_instead_of_reset  # type: ignore[method-assign]


def starts_new_run(trainer: Trainer) -> bool:
    """Return True if the run starts from the checkpoint of another run."""
    found = [each for each in callbacks_of(trainer, ExactResume) if each.directory is not None]
    return trainer.ckpt_path is not None and any(not each.goes_on(trainer) for each in found)


# ---- the loops


def moment(trainer: Trainer) -> str:
    """Return the position of the loops, among those at which a checkpoint may be saved."""
    fit = trainer.fit_loop
    if trainer.state.fn is not TrainerFn.FITTING:
        return ELSEWHERE
    if trainer.validating:
        validated = fit.epoch_loop.val_loop.batch_progress
        whole = validated.is_last_batch and validated.current.ready == validated.current.completed
        return VALIDATION if whole else ELSEWHERE
    epochs, batches = fit.epoch_progress.total, fit.epoch_loop.batch_progress.total
    if epochs.processed == epochs.completed + 1:  # type: ignore[attr-defined]
        return EPOCH
    if batches.processed == batches.completed + 1:  # type: ignore[attr-defined]
        return BATCH
    return ELSEWHERE


def _settle(trainer: Trainer) -> None:
    """Make the loops behave like those of an uninterrupted run."""
    fit = trainer.fit_loop
    # The loop's own property ignores assignments if the run is limited by steps.
    _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]
    fit.epoch_loop.reset_restart_stage()
    fit.epoch_loop.val_loop.reset_restart_stage()


# An error raised below one of these was caused by the content of the checkpoint.
RESTORING = frozenset(
    function.__code__
    for function in (
        _CheckpointConnector._restore_modules_and_callbacks,
        _CheckpointConnector.restore_training_state,
        ExactResume.on_fit_start,
        ExactResume.on_train_start,
        GradientPolicies._apply_restored,
    )
)


@contextmanager
def checked_restore(checkpoint: Path | None) -> Iterator[None]:
    """Check a checkpoint before Lightning restores it, and name it if Lightning cannot restore it.

    This is done here, since not every strategy reads checkpoints through the trainer's plugin.

    Raises:
        PolicyError: In place of Lightning's errors.
    """
    if checkpoint is not None:
        check_checkpoint(checkpoint)
    try:
        yield
    except (PolicyError, MisconfigurationException):
        raise
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        if checkpoint is None or not any(frame.f_code in RESTORING for frame, _ in frames):
            raise
        # Python's own message about a wrong type would not be helpful.
        is_clear = isinstance(error, RuntimeError | ValueError)
        what = f" ({brief(str(error), most=120)})" if is_clear else ""
        raise PolicyError(
            f"{KEY}: {checkpoint} holds a state of another kind{what}: {CANNOT_RESUME}"
        ) from error


# ---- checkpoint callbacks


def _kept(trainer: Trainer) -> dict[str, ModelCheckpoint]:
    return {callback.state_key: callback for callback in callbacks_of(trainer, ModelCheckpoint)}


def _stoppers(trainer: Trainer) -> dict[str, EarlyStopping]:
    return {callback.state_key: callback for callback in callbacks_of(trainer, EarlyStopping)}


def _state_here(
    state: dict[str, Any], callback: ModelCheckpoint, step: int, directory: Path
) -> dict[str, Any]:
    """Return a ModelCheckpoint's state with paths in its directory, which may have been moved or copied.

    Without checkpoints that are missing, damaged, of another run, or were overwritten after `step`; the
    resumed run, which repeats those steps, writes the latter again.
    """
    folder, scores = Path(str(callback.dirpath)), state["best_k_models"]
    own = {path.resolve() for path in own_checkpoints(directory)}

    def is_own(path: Path) -> bool:
        # The record lists none outside the directory of the run, where the config may have put them.
        known = path.resolve() in own or not is_inside(folder, directory)
        return known and is_inside(path, folder)

    here: dict[str, str] = {}
    named: dict[str, Any]
    for path in {each for each in (*map(state.get, PATHS), *scores) if each}:
        name = os.path.relpath(path, state["dirpath"])
        try:
            # Lightning deletes what it takes for outdated.
            if is_own(folder / name) and step_of(folder / name) <= step:
                here[path] = str(folder / name)
        except PolicyError as error:
            if path in scores:
                score = f"{callback.monitor} {float(scores[path]):.4g}"
                rank_zero_warn(f"{error}: {name} ({score}) does not count among the best checkpoints")
    named = {name: here.get(state.get(name, ""), "") for name in PATHS}
    left = {here[path]: score for path, score in scores.items() if path in here}
    if len(left) < len(scores):
        best = (min if callback.mode == "min" else max)(left, key=left.__getitem__, default="")
        named |= {"best_model_path": best, "best_model_score": left.get(best)}
    return {**state, **named, "dirpath": callback.dirpath, "best_k_models": left}


# ---- what is logged


def _pending_row(trainer: Trainer, now: str) -> dict[str, Any]:
    """Return the row that is logged after a position: ``metrics`` by name, and ``step``; or nothing."""
    connector, epoch_loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    due = {BATCH: connector.should_update_logs and not epoch_loop._should_accumulate(), EPOCH: True}
    values = convert_tensors_to_scalars(connector.metrics["log"]) if due.get(now) else {}
    if not values:
        return {}
    step = values.pop("step", None)
    if step is None:
        values.setdefault("epoch", trainer.current_epoch)
        # Lightning logs the values of an epoch at the step of its last batch.
        step = epoch_loop._batches_that_stepped - (now == EPOCH)
    return {"metrics": values, "step": int(step)}


def _log_row(trainer: Trainer, row: dict[str, Any]) -> None:
    if row:
        trainer._logger_connector.log_metrics(row["metrics"], step=row["step"])


def _ended_epoch(trainer: Trainer, now: str) -> dict[str, Any]:
    """Return the averages, for loggers and callbacks, of an epoch whose last batch is done."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if now not in (BATCH, VALIDATION) or not epoch_loop._is_training_done:
        return {}
    averages = epoch_loop._results.metrics(on_step=False)
    return {
        "callback": {name: torch.as_tensor(value).cpu() for name, value in averages["callback"].items()},
        "log": list(averages["log"]),
    }


def _restore_metrics(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restore the metrics that were logged before."""
    metrics = move_data_to_device(state["metrics"], trainer.strategy.root_device)
    trainer._logger_connector._callback_metrics.update(metrics)


class _AppendingWriter(ExperimentWriter):
    """Appends to an existing file, which Lightning's own class deletes."""

    def _check_log_dir_exists(self) -> None:
        path = Path(self.metrics_file_path)
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                self.metrics_keys = next(csv.reader(file), [])


def append_rows(logger: CSVLogger) -> None:
    """Make a CSVLogger append to the file of its version, instead of deleting it."""
    logger._experiment = _AppendingWriter(logger.log_dir)


def _csv_loggers(trainer: Trainer) -> list[CSVLogger]:
    if not trainer.is_global_zero:
        return []
    return [logger for logger in trainer.loggers if isinstance(logger, CSVLogger)]


def _count_rows(logger: CSVLogger) -> int:
    """Write the pending rows of a logger, and return the number of lines in its file."""
    logger.save()
    return len(_lines(Path(logger.experiment.metrics_file_path)))


def _cut_rows(path: Path, number: int) -> None:
    """Truncate a log to its first lines, and keep the names of its columns."""
    lines = _lines(path)
    if len(lines) < number:
        rank_zero_warn(f"{path} lacks rows of the steps before the checkpoint")
    elif len(lines) > max(number, 1):
        with written_whole(path, "wb") as file:
            file.writelines(lines[: max(number, 1)])


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.is_file() else []


# ---- the state of a rank


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the global random states of this process, in tensors, numbers, strings and containers.

    Args:
        device: The device of the process; a CUDA device has its own random state.
    """
    mersenne: Any = np.random.get_state()
    name, keys, *rest = mersenne
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore the states that `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


def _restore_rank(pl_module: LightningModule, state: dict[str, Any]) -> None:
    set_random_states(state["random"], pl_module.device)
    for name, parameter in pl_module.named_parameters():
        gradient = state.get("gradients", {}).get(plain_name(name))
        if gradient is not None:
            parameter.grad = torch.empty_like(parameter)
            local_shard(parameter.grad).copy_(gradient)
