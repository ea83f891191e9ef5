"""Checks a checkpoint while Lightning restores it, and says in one line why it cannot be restored."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

from gradpolicy.errors import PolicyError, brief
from gradpolicy.lightning.callback import GradientPolicies
from gradpolicy.lightning.checkpoint_checks import CANNOT_RESUME
from gradpolicy.lightning.checkpoint_reading import KEY, check_checkpoint, named_checkpoints
from gradpolicy.lightning.exact_resume import ExactResume

COUNTED = ("optimizer_states", "lr_schedulers")
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


class CheckedResume(Callback):
    """Refuses a checkpoint of another number of optimizers, and one by which files would be deleted.

    Lightning restores as many states as there are and ignores the rest. Its ModelCheckpoint deletes outdated
    files that its saved state names below its own directory, whoever wrote that state.

    Raises:
        PolicyError: Before anything is trained.
    """

    def __init__(self) -> None:
        self._states: dict[str, int] = {}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Counts the states of optimizers and schedulers. A sharded checkpoint holds none of them here."""
        if trainer.state.fn is not TrainerFn.FITTING:
            return
        self._states = {name: len(checkpoint[name]) for name in COUNTED if name in checkpoint}
        _check_paths(trainer, checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compares the counts with what this run has."""
        states, self._states = self._states, {}
        for name, needed in zip(
            COUNTED, (len(trainer.optimizers), len(trainer.lr_scheduler_configs)), strict=True
        ):
            if states.get(name, needed) != needed:
                raise PolicyError(
                    f"{KEY}: {trainer.ckpt_path} holds {states[name]} {name}, and this run needs {needed}:"
                    f" {CANNOT_RESUME}"
                )


@contextmanager
def checked_restore(checkpoint: Path | None) -> Iterator[None]:
    """Checks a checkpoint before Lightning restores it, and names it if Lightning cannot restore it.

    The check is here, since not every strategy of Lightning reads checkpoints through the trainer's plugin.

    Raises:
        PolicyError: In place of what Lightning raises.
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
        # Python's message about a value of the wrong type does not help the reader.
        is_clear = isinstance(error, RuntimeError | ValueError)
        what = f" ({brief(str(error), most=120)})" if is_clear else ""
        raise PolicyError(
            f"{KEY}: {checkpoint} holds a state of another kind{what}: {CANNOT_RESUME}"
        ) from error


def _check_paths(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Refuses a state that names checkpoints which this run would delete and which are not beside its own."""
    own = Path(str(trainer.ckpt_path)).resolve().parent
    kept = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    folders = [Path(each.dirpath).resolve() for each in kept if each.dirpath]
    for named in named_checkpoints(checkpoint):
        path = Path(named).resolve()
        if own not in path.parents and any(folder in path.parents for folder in folders):
            raise PolicyError(
                f"{KEY}: {trainer.ckpt_path} names {path}, which is not beside it, as a checkpoint of its"
                " run, and this run would delete it; choose another directory for the checkpoints of this run"
            )
