"""Exact resume under Lightning 2.6.6: saves and restores what Lightning does not.

A checkpoint may be written after a batch but before its validation, its log row and its counters, or after a
validation but before the epoch ends. Lightning derives from its counters what was done, and after the last
batch of an epoch skips the validation and the end of the epoch. The saved counters are changed here, before
Lightning reads them, such that it continues where the checkpoint was written. No other file uses private
parts of Lightning.
"""

import random
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars, move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.tensors.sharding import local_shard
from gradpolicy.train.agreement import of_every_rank
from gradpolicy.train.lightning.checkpoints import AtomicCheckpointIO, check_optimizers, counts_of
from gradpolicy.train.lightning.resumed_files import count_rows, cut, goes_on, restore_callbacks
from gradpolicy.train.lightning.runs import list_checkpoint
from gradpolicy.train.lightning.trainer_parts import callbacks_of
from gradpolicy.where import plain_name

# The hooks in which a checkpoint is written: `on_train_batch_end`, `on_validation_end`, `on_train_epoch_end`.
# In other hooks, or after an exception, Lightning's own behaviour is used.
BATCH, VALIDATION, EPOCH, ELSEWHERE = "batch", "validation", "epoch", "elsewhere"


class ExactResume(Callback):
    """Saves and restores the state that an exact resume needs and Lightning does not save.

    - the global random states (Python, NumPy, torch, the CUDA device) of every rank;
    - within an accumulation window, the gradients that every rank has accumulated;
    - the position in Lightning's loops;
    - the values that were about to be logged.

    If the data module is one of :mod:`gradpolicy.tasks` or its loader saves its position, and the optimizer
    restores its state, then a run that was killed at any moment and resumed from its last checkpoint ends
    with the same bits as an uninterrupted run. Everything saved loads with ``weights_only=True``.

    Args:
        directory: The directory of the run, whose record lists the checkpoints that AtomicCheckpointIO
            writes. If the checkpoint is one of them, the run continues there: its log rows and checkpoints of
            later steps are deleted before training. Otherwise a new run starts from the checkpoint, with new
            best scores and early stopping. None leaves both to Lightning.

    Attributes:
        restoring: True from the start of a run until its state is restored.
    """

    KEY = "gradpolicy_exact_resume"

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = None if directory is None else Path(directory)
        self.restoring = False
        self._restored: list[dict[str, Any]] = []
        self._counts: dict[str, int] = {}
        self._step = 0
        self._stopped = False
        # The position at which training continues, until the end of its epoch.
        self._at: dict[str, Any] = {}
        self._max_steps: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have checkpoints listed that are written from now on."""
        self.restoring = True
        writer = trainer.strategy.checkpoint_io
        if self.directory is not None and isinstance(writer, AtomicCheckpointIO):
            writer.list_checkpoint = partial(list_checkpoint, self.directory)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state of every rank; Lightning calls this on all of them."""
        position = saved_position(trainer)
        position["averages"] = self._at.get("averages") or position["averages"]
        state = {
            "random": random_states(pl_module.device),
            "position": position,
            "metrics": move_data_to_device(dict(trainer.callback_metrics), "cpu"),
            "rows": count_rows(trainer),
        }
        if position["accumulates"]:
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
        """Store the state until training starts, and change the state of the loops."""
        if trainer.state.fn is TrainerFn.FITTING:
            self._step, self._counts = checkpoint["global_step"], counts_of(checkpoint)
            self._restored = checkpoint.get(self.KEY, [])
            if self._restored:
                last_step = trainer.max_steps != -1 and self._step >= trainer.max_steps
                self._at = changed(checkpoint["loops"]["fit_loop"], self._restored[0]["position"], last_step)
        restore_callbacks(trainer, checkpoint["callbacks"], self._step, self.directory)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let a run that has taken its last step complete its epoch."""
        if self._at.get("last_step"):
            self._max_steps = trainer.max_steps
            trainer.fit_loop.epoch_loop.max_steps = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore this rank's state, after all other hooks that run before the first batch.

        Raises:
            PolicyError: For a checkpoint of another optimizer, or of another number of them.
        """
        check_optimizers(trainer, self._counts)
        saved, self._counts = self._take(trainer), {}
        if saved:
            stoppers = callbacks_of(trainer, EarlyStopping)
            self._stopped = any(each.wait_count >= each.patience for each in stoppers)
            trainer.should_stop |= self._stopped and not self._at["ends_epoch"]
            if len(saved) == trainer.world_size:
                restore_rank(pl_module, saved[trainer.global_rank])
            else:
                rank_zero_warn(
                    f"the checkpoint is of {len(saved)} process(es), resumed by {trainer.world_size}: random"
                    " states are re-initialised, and the run will not equal an uninterrupted one bit for bit"
                )
            self._continue_loops(trainer)
        self.restoring = False

    def _take(self, trainer: Trainer) -> list[dict[str, Any]]:
        """Return the saved states once; restore the logs, and delete what was written later."""
        saved, self._restored = self._restored, []
        if self.directory is not None:
            cut(trainer, self.directory, self._step, saved[0]["rows"] if saved else [])
        if saved:
            metrics = saved[trainer.global_rank if len(saved) == trainer.world_size else 0]["metrics"]
            trainer.callback_metrics.update(move_data_to_device(metrics, trainer.strategy.root_device))
            trainer._logger_connector.log_metrics(saved[0]["position"]["row"])
        return saved

    def _continue_loops(self, trainer: Trainer) -> None:
        """Do what was left to do and is not done by Lightning's loops."""
        fit, hook = trainer.fit_loop, self._at["hook"]
        if hook == EPOCH:
            fit.epoch_loop.restarting = False
            # The sanity check has reset them.
            fit.epoch_loop.val_loop.batch_progress.load_state_dict(self._at["validated"])
            if self._at["is_last_batch"]:
                # The schedulers read the number of the epoch that has ended.
                fit.epoch_progress.current.completed -= 1
                fit.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
                fit.epoch_progress.current.completed += 1
        elif self._at["ends_epoch"] or (hook == BATCH and not self._at["validates"]):
            fit.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
            # Or Lightning would train another batch before it ends the epoch.
            fit.epoch_loop.val_loop._has_run = self._at["ends_epoch"]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Correct the counters of a validation that Lightning takes for an interrupted one."""
        if self._at.get("validates"):
            self._at["validates"] = False
            total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
            total.ready, total.started = total.ready - 1, total.started - 1
            self._restore_max_steps(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the epoch as any other, with the averages over its batches before the checkpoint."""
        at, self._at = self._at, {}
        if not at:
            return
        fit = trainer.fit_loop
        fit._restarting = fit.epoch_loop.restarting = False
        self._restore_max_steps(trainer)
        if at["ends_epoch"]:
            fit.epoch_loop.batch_progress.is_last_batch = at["is_last_batch"]
        for name, value in at["averages"].get("callback", {}).items():
            is_logged = name in at["averages"]["log"]
            # Reduced by the maximum, since the number is the same on every rank.
            how: dict[str, Any] = {"on_step": False, "on_epoch": True, "reduce_fx": "max", "sync_dist": True}
            pl_module.log(name, value.to(pl_module.device), logger=is_logged, **how)
        trainer.should_stop |= self._stopped

    def _restore_max_steps(self, trainer: Trainer) -> None:
        if self._max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps, self._max_steps = self._max_steps, None

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that everything is restored."""
        self.restoring = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Complete the log and the metrics of a run without remaining steps."""
        self.restoring = False
        if self._restored:
            self._take(trainer)


def starts_new_run(trainer: Trainer) -> bool:
    """Return True if the run starts from the checkpoint of another run."""
    found = [each.directory for each in callbacks_of(trainer, ExactResume)]
    return trainer.ckpt_path is not None and any(each and not goes_on(trainer, each) for each in found)


# ---- the state of a rank


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the global random states of this process, in tensors, numbers, strings and containers."""
    mersenne: Any = np.random.get_state()
    name, keys, *rest = mersenne
    states: dict[str, Any] = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest)}
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {**states, "torch": torch.get_rng_state(), **cuda}


def restore_rank(pl_module: LightningModule, state: dict[str, Any]) -> None:
    """Restore the random states and the accumulated gradients of this process."""
    states, device = state["random"], pl_module.device
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    for name, parameter in pl_module.named_parameters():
        gradient = state.get("gradients", {}).get(plain_name(name))
        if gradient is not None:
            parameter.grad = torch.empty_like(parameter)
            local_shard(parameter.grad).copy_(gradient)


# ---- the position in Lightning's loops


def hook_of(trainer: Trainer) -> str:
    """Return the hook in which the loops are, among those in which a checkpoint may be written."""
    fit, fits = trainer.fit_loop, trainer.state.fn is TrainerFn.FITTING
    if trainer.validating:
        validated = fit.epoch_loop.val_loop.batch_progress
        is_complete = validated.is_last_batch and validated.current.ready == validated.current.completed
        return VALIDATION if fits and is_complete else ELSEWHERE
    for hook, progress in ((EPOCH, fit.epoch_progress), (BATCH, fit.epoch_loop.batch_progress)):
        total: Any = progress.total
        if fits and total.processed == total.completed + 1:
            return hook
    return ELSEWHERE


def saved_position(trainer: Trainer) -> dict[str, Any]:
    """Return the position in the loops, the row that is logged after it, and the averages of its epoch."""
    hook, loop, connector = hook_of(trainer), trainer.fit_loop.epoch_loop, trainer._logger_connector
    accumulates, fetcher = loop._should_accumulate(), cast(Any, trainer.fit_loop._data_fetcher)
    row: dict[str, Any] = {}
    if hook == EPOCH or (hook == BATCH and connector.should_update_logs and not accumulates):
        row = convert_tensors_to_scalars(connector.metrics["log"])
    if row and "step" not in row:
        # Lightning logs the values of an epoch at the step of its last batch.
        step = loop._batches_that_stepped - (hook == EPOCH)
        row = {"epoch": trainer.current_epoch, **row, "step": step}
    averages: dict[str, Any] = {}
    if hook in (BATCH, VALIDATION) and loop._is_training_done:
        found = loop._results.metrics(on_step=False)
        callback = {name: torch.as_tensor(value).cpu() for name, value in found["callback"].items()}
        averages = {"callback": callback, "log": list(found["log"])}
    validates = hook == BATCH and loop._should_check_val_fx(fetcher)
    given = {"hook": hook, "accumulates": accumulates, "validates": validates}
    return {**given, "row": row, "averages": averages}


def changed(loops: dict[str, Any], position: dict[str, Any], last_step: bool) -> dict[str, Any]:
    """Change the saved state of the loops such that Lightning continues at a position.

    Args:
        loops: The saved state of the loops.
        position: The position, from :func:`saved_position`.
        last_step: True if the run takes no further step.

    Returns:
        The position, with what is needed to continue there.
    """
    hook, validates, batches = position["hook"], position["validates"], loops["epoch_loop.batch_progress"]
    validated, is_last_batch = loops["epoch_loop.val_loop.batch_progress"], batches["is_last_batch"]
    last_step &= hook in (BATCH, VALIDATION)
    ends_epoch = last_step or (hook in (BATCH, VALIDATION) and is_last_batch)
    ends_epoch &= not validates
    if hook in (BATCH, EPOCH):
        progress = batches if hook == BATCH else loops["epoch_progress"]
        for counts in (progress["total"], progress["current"]):
            counts["completed"] = counts["processed"]
    if validates:
        # As if it had been interrupted before its first batch.
        total, current = validated["total"], validated["current"]
        total["ready"], total["started"] = total["ready"] + 1, total["started"] + 1
        current.update(dict.fromkeys(current, 0))
    batches["is_last_batch"] |= ends_epoch
    if ends_epoch or (hook == BATCH and not validates and not position["accumulates"]):
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    found = {"validated": validated, "is_last_batch": is_last_batch, "ends_epoch": ends_epoch}
    return {**position, **found, "last_step": last_step}
