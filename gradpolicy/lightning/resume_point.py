"""The point in Lightning's loops at which a checkpoint was written, and how a resumed run continues from it.

Some checkpoints are written after a batch but before its validation, its log row and its counters; others
after a validation but before the schedulers step. A resumed Lightning guesses from its counters what was
done. After the last batch of an epoch it guesses wrongly: it skips the validation, the hooks of the epoch's
end, and the count of epochs. Here the point is saved, and the loops themselves do the rest.
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerFn

# The hooks in which it was written: `on_train_batch_end`, `on_validation_end`, `on_train_epoch_end`.
BATCH, VALIDATION, EPOCH = "batch", "validation", "epoch"
# Anywhere else, or after an exception: what Lightning does is right, or as good as anything.
ELSEWHERE = "elsewhere"


def moment(trainer: Trainer) -> str:
    """Which of these points the loops have reached."""
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


def allow_epoch_end(trainer: Trainer, saved_in: str) -> None:
    """Lets a run whose last step is done end its epoch. Call it in ``on_fit_start``."""
    if saved_in in (BATCH, VALIDATION):
        trainer.fit_loop.epoch_loop.max_steps = -1


def continue_after(
    trainer: Trainer, saved_in: str, loops: dict[str, Any], max_steps: int, log: Callable[[], None]
) -> None:
    """Continues the loops after the point at which a checkpoint was saved. Call it in ``on_train_start``.

    Args:
        trainer: The trainer, about to train.
        saved_in: The point.
        loops: The loops' state as it was saved; Lightning has changed its own copy since.
        max_steps: The trainer's limit before `allow_epoch_end`.
        log: Logs what the run would have logged after that point.
    """
    if saved_in == ELSEWHERE:
        return
    fit = trainer.fit_loop
    assert fit._data_fetcher is not None
    fetcher = fit._data_fetcher
    fit.load_state_dict(loops)
    if saved_in == EPOCH:
        _end_epoch(trainer, log)
        return
    epoch_loop = fit.epoch_loop

    def end_batch_instead_of_reset() -> None:
        del epoch_loop.reset
        _settle(trainer)
        epoch_loop.max_steps = max_steps
        if saved_in == BATCH:
            epoch_loop.batch_progress.increment_completed()
            log()
        else:
            epoch_loop._skip_next_val = True
        # Epoch averages begin anew at the first batch of an epoch, which the next batch is not.
        trainer._logger_connector._first_loop_iter = True
        epoch_loop.on_advance_end(fetcher)

    # In an epoch that has begun, no hook is left between those of the start and the next batch.
    epoch_loop.reset = end_batch_instead_of_reset  # type: ignore[method-assign]


def _end_epoch(trainer: Trainer, log: Callable[[], None]) -> None:
    fit = trainer.fit_loop
    _settle(trainer)
    fit.reset_restart_stage()
    if fit.epoch_loop._num_ready_batches_reached():
        fit.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    log()
    fit.epoch_progress.increment_completed()


def _settle(trainer: Trainer) -> None:
    """Makes the loops behave as those of a run that was never ended."""
    fit = trainer.fit_loop
    # The loop's own property ignores what it is set to if the run is limited by steps.
    _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]
    fit.epoch_loop.reset_restart_stage()
    fit.epoch_loop.val_loop.reset_restart_stage()
