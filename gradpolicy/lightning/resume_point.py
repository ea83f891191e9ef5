"""Where in Lightning's loops a checkpoint was written, and how a resumed run does what came after.

Checkpoints are written in the middle of things: after a batch but before its validation, its log row and its
counters; after validation but before the schedulers. Lightning, resuming, guesses from its counters what was
done, and after the last batch of an epoch guesses wrongly: validation, the hooks of the epoch's end and an
epoch's count are left out. Here the place is written down, and the rest is done by the code that would have
done it.
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerFn

# After a batch, in `on_train_batch_end`; at the end of a validation; in `on_train_epoch_end`.
BATCH, VALIDATION, EPOCH = "batch", "validation", "epoch"
# Between such moments, or where something broke off: Lightning's own way is right, or as good as any.
ELSEWHERE = "elsewhere"


def moment(trainer: Trainer) -> str:
    """Which of these moments it is."""
    fit = trainer.fit_loop
    if trainer.state.fn is not TrainerFn.FITTING or trainer.sanity_checking:
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


def let_in(trainer: Trainer, saved_in: str) -> None:
    """Has a run whose last step is done end its epoch before it ends. Call it in ``on_fit_start``."""
    if saved_in in (BATCH, VALIDATION):
        trainer.fit_loop.epoch_loop.max_steps = -1


def take_up(
    trainer: Trainer, saved_in: str, loops: dict[str, Any], max_steps: int, log: Callable[[], None]
) -> None:
    """Has the loops go on after the moment in which a checkpoint was saved. Call it in ``on_train_start``.

    Args:
        trainer: The trainer, about to train.
        saved_in: The moment.
        loops: The loops' state as it was saved, without what Lightning has made of it since.
        max_steps: The trainer's limit, as it was before `let_in`.
        log: Gives the loggers what they would have got after that moment.
    """
    if saved_in == ELSEWHERE:
        return
    fit = trainer.fit_loop
    assert fit._data_fetcher is not None
    fetcher = fit._data_fetcher
    fit.load_state_dict(loops)
    fit._combined_loader_states_to_load = []
    if saved_in == EPOCH:
        _end_epoch(trainer, log)
        return
    # Says that the epoch has begun already.
    fit.update_restart_stage()
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
        # The next batch is not the first one of the epoch, for which epoch averages begin anew.
        trainer._logger_connector._first_loop_iter = True
        epoch_loop.on_advance_end(fetcher)

    # There is no hook between the hooks of the start and the first batch of an epoch begun already.
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
    """From here on the loops are as those of a run that was never ended."""
    fit = trainer.fit_loop
    # The loop's own property says that it restarts whatever it is told, where steps are counted.
    _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]
    fit.epoch_loop.reset_restart_stage()
    fit.epoch_loop.val_loop.reset_restart_stage()
