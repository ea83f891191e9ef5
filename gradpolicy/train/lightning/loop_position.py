"""The position in Lightning's loops, read in version 2.6.6, at which training continues.

A checkpoint may be written after a batch but before its validation, its log row and its counters, or after a
validation but before the epoch ends. Lightning derives from its counters what was done, and after the last
batch of an epoch skips the validation and the end of the epoch. The saved counters are changed here, before
Lightning reads them, such that it continues where the checkpoint was written. No other file uses private
parts of Lightning.
"""

from typing import Any

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

# The hooks in which a checkpoint is written: `on_train_batch_end`, `on_validation_end`, `on_train_epoch_end`.
BATCH, VALIDATION, EPOCH = "batch", "validation", "epoch"
# In other hooks, or after an exception, Lightning's own behaviour is used.
ELSEWHERE = "elsewhere"
# The keys of counters in the saved state of the loops.
BATCHES, VALIDATED = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"


def hook_of(trainer: Trainer) -> str:
    """Return the hook in which the loops are, among those in which a checkpoint may be written."""
    fit = trainer.fit_loop
    if trainer.state.fn is not TrainerFn.FITTING:
        return ELSEWHERE
    if trainer.validating:
        validated = fit.epoch_loop.val_loop.batch_progress
        is_complete = validated.is_last_batch and validated.current.ready == validated.current.completed
        return VALIDATION if is_complete else ELSEWHERE
    epochs: Any = fit.epoch_progress.total
    batches: Any = fit.epoch_loop.batch_progress.total
    if epochs.processed == epochs.completed + 1:
        return EPOCH
    return BATCH if batches.processed == batches.completed + 1 else ELSEWHERE


def saved_position(trainer: Trainer) -> dict[str, Any]:
    """Return the position in the loops, and the values that are logged after it."""
    hook, epoch_loop = hook_of(trainer), trainer.fit_loop.epoch_loop
    accumulates = epoch_loop._should_accumulate()
    fetcher: Any = trainer.fit_loop._data_fetcher
    return {
        "hook": hook,
        "accumulates": accumulates,
        "validates": hook == BATCH and epoch_loop._should_check_val_fx(fetcher),
        "row": _pending_row(trainer, hook, accumulates),
        "averages": _averages(trainer, hook),
    }


def _pending_row(trainer: Trainer, hook: str, accumulates: bool) -> dict[str, Any]:
    """Return the row that is logged after a position: ``metrics`` by name, and ``step``; or nothing."""
    connector = trainer._logger_connector
    due = {BATCH: connector.should_update_logs and not accumulates, EPOCH: True}
    values = convert_tensors_to_scalars(connector.metrics["log"]) if due.get(hook) else {}
    if not values:
        return {}
    step = values.pop("step", None)
    if step is None:
        values.setdefault("epoch", trainer.current_epoch)
        # Lightning logs the values of an epoch at the step of its last batch.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped - (hook == EPOCH)
    return {"metrics": values, "step": int(step)}


def log_row(trainer: Trainer, row: dict[str, Any]) -> None:
    """Log a row that was not logged when the checkpoint was written."""
    for logger in trainer.loggers if row else ():
        logger.log_metrics(row["metrics"], step=row["step"])
        logger.save()


def _averages(trainer: Trainer, hook: str) -> dict[str, Any]:
    """Return the averages, for loggers and callbacks, of an epoch whose last batch is done."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if hook not in (BATCH, VALIDATION) or not epoch_loop._is_training_done:
        return {}
    averages = epoch_loop._results.metrics(on_step=False)
    return {
        "callback": {name: torch.as_tensor(value).cpu() for name, value in averages["callback"].items()},
        "log": list(averages["log"]),
    }


class LoopPosition:
    """A position in the loops, and what is left to do there.

    Args:
        loops: The saved state of the loops, which is changed.
        state: The position, from :func:`saved_position`.
        last_step: True if the run takes no further step.
    """

    def __init__(self, loops: dict[str, Any], state: dict[str, Any], last_step: bool) -> None:
        batches = loops[BATCHES]
        self.state, self.hook, self.validates = state, state["hook"], state["validates"]
        self.averages: dict[str, Any] = state["averages"]
        self.validated, self.is_last_batch = loops[VALIDATED], batches["is_last_batch"]
        is_within = self.hook in (BATCH, VALIDATION)
        self.ends_epoch = is_within and not self.validates and (self.is_last_batch or last_step)
        self.last_step = is_within and last_step
        self._max_steps: int | None = None
        if self.hook == EPOCH:
            _complete(loops["epoch_progress"])
        if self.hook == BATCH:
            _complete(batches)
        if self.validates:
            # As if it had been interrupted before its first batch.
            total, current = self.validated["total"], self.validated["current"]
            total["ready"], total["started"] = total["ready"] + 1, total["started"] + 1
            current.update(dict.fromkeys(current, 0))
        if self.ends_epoch:
            batches["is_last_batch"] = True
        if self.ends_epoch or (self.hook == BATCH and not self.validates and not state["accumulates"]):
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1

    def on_fit_start(self, trainer: Trainer) -> None:
        """Let a run that has taken its last step complete its epoch."""
        if self.last_step:
            self._max_steps = trainer.max_steps
            trainer.fit_loop.epoch_loop.max_steps = -1

    def on_train_start(self, trainer: Trainer) -> None:
        """Do what was left to do and is not done by Lightning's loops."""
        fit = trainer.fit_loop
        log_row(trainer, self.state["row"])
        if self.hook == EPOCH:
            fit.epoch_loop.restarting = False
            # The sanity check has reset them.
            fit.epoch_loop.val_loop.batch_progress.load_state_dict(self.validated)
            if self.is_last_batch:
                # The schedulers read the number of the epoch that has ended.
                fit.epoch_progress.current.completed -= 1
                fit.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
                fit.epoch_progress.current.completed += 1
        elif self.ends_epoch or (self.hook == BATCH and not self.validates):
            fit.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
            # Or Lightning would train another batch before it ends the epoch.
            fit.epoch_loop.val_loop._has_run = self.ends_epoch

    def on_validation_start(self, trainer: Trainer) -> None:
        """Correct the counters of a validation that Lightning takes for an interrupted one."""
        if self.validates:
            self.validates = False
            total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
            total.ready -= 1
            total.started -= 1
            self._restore_max_steps(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the epoch as any other, with the averages over its batches before the checkpoint."""
        fit = trainer.fit_loop
        fit._restarting = fit.epoch_loop.restarting = False
        self._restore_max_steps(trainer)
        if self.ends_epoch:
            fit.epoch_loop.batch_progress.is_last_batch = self.is_last_batch
        for name, value in self.averages.get("callback", {}).items():
            pl_module.log(
                name,
                value.to(pl_module.device),
                logger=name in self.averages["log"],
                on_step=False,
                on_epoch=True,
                # Reduced by the maximum, since the number is the same on every rank.
                reduce_fx="max",
                sync_dist=True,
            )

    def _restore_max_steps(self, trainer: Trainer) -> None:
        if self._max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps, self._max_steps = self._max_steps, None


def _complete(progress: dict[str, Any]) -> None:
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]
