"""Exact resume: saves and restores what Lightning does not."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.errors import PolicyError, brief, shortened
from gradpolicy.tensors.sharding import local_shard
from gradpolicy.train.agreement import of_every_rank
from gradpolicy.train.lightning.checkpoints import CANNOT_RESUME, KEY, check_checkpoint
from gradpolicy.train.lightning.csv_rows import count_rows, cut_rows
from gradpolicy.train.lightning.kept_checkpoints import kept_by, restore_kept
from gradpolicy.train.lightning.loop_position import LoopPosition, log_row, saved_position
from gradpolicy.train.lightning.runs import OwnCheckpoints, cut_checkpoints, run_of
from gradpolicy.train.lightning.trainer_parts import callbacks_of
from gradpolicy.where import plain_name

COUNTED = ("optimizer_states", "lr_schedulers")
# Optimizer.__setstate__ adds this default, which some optimizers, such as Muon, do not have.
ADDED_DEFAULT = "differentiable"


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

    Attributes:
        restoring: True from the start of a run until its first epoch or test begins.
    """

    KEY = "gradpolicy_exact_resume"

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = None if directory is None else Path(directory)
        self.restoring = False
        self._restored: list[dict[str, Any]] = []
        self._position: LoopPosition | None = None
        self._counts: dict[str, int] = {}
        self._step = 0
        self._stopped = False

    def goes_on(self, trainer: Trainer) -> bool:
        """Return True if the checkpoint that is resumed is one of this run."""
        if self.directory is None or trainer.ckpt_path is None:
            return False
        run = run_of(Path(str(trainer.ckpt_path)))
        return run is not None and run.resolve() == self.directory.resolve()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """List the checkpoints that are written from now on."""
        self.restoring = True
        writer = trainer.strategy.checkpoint_io
        if self.directory is not None and not isinstance(writer, OwnCheckpoints):
            trainer.strategy.checkpoint_io = OwnCheckpoints(writer, self.directory)

    # ---- saving

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state of every rank; Lightning calls this on all of them."""
        position = saved_position(trainer)
        if self._position is not None and self._position.averages:
            position["averages"] = self._position.averages
        state = {
            "random": random_states(pl_module.device),
            "position": position,
            "should_stop": trainer.should_stop,
            "metrics": move_data_to_device(dict(trainer.callback_metrics), "cpu"),
            "rows": count_rows(trainer),
            "loaders": checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader"),
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
        states = checkpoint["callbacks"]
        if trainer.state.fn is not TrainerFn.FITTING:
            # A test must not change the best checkpoint.
            for key in kept_by(trainer):
                states.pop(key, None)
            return
        self._step = checkpoint["global_step"]
        # In a sharded checkpoint they are in its shards.
        self._counts = {name: len(checkpoint[name]) for name in COUNTED if name in checkpoint}
        self._restored = checkpoint.get(self.KEY, [])
        if self._restored:
            loops, state = checkpoint["loops"]["fit_loop"], self._restored[0]
            if len(self._restored) == trainer.world_size:
                state = self._restored[trainer.global_rank]
                if state["loaders"] is not None:
                    loops["state_dict"]["combined_loader"] = state["loaders"]
            last_step = trainer.max_steps != -1 and self._step >= trainer.max_steps
            self._position = LoopPosition(loops, state["position"], last_step)
        if self.goes_on(trainer):
            assert self.directory is not None
            restore_kept(trainer, states, self._step, self.directory)
        elif self.directory is not None:
            for key in (*kept_by(trainer), *_stoppers(trainer)):
                states.pop(key, None)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let a run that has taken its last step complete its epoch."""
        if self._position is not None:
            self._position.on_fit_start(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore this rank's state, after all other hooks that run before the first batch.

        Raises:
            PolicyError: For a checkpoint of another optimizer, or of another number of them. Lightning
                restores as many states as there are and ignores the rest.
        """
        self._check_optimizers(trainer)
        self._cut(trainer)
        saved, self._restored = self._restored, []
        if not saved or self._position is None:
            return
        same_ranks = len(saved) == trainer.world_size
        state = saved[trainer.global_rank if same_ranks else 0]
        stopped = any(each.wait_count >= each.patience for each in _stoppers(trainer).values())
        self._stopped = state["should_stop"] and stopped
        trainer.should_stop |= self._stopped and not self._position.ends_epoch
        _restore_metrics(trainer, state)
        if same_ranks:
            _restore_rank(pl_module, state)
        else:
            rank_zero_warn(
                f"the checkpoint is of {len(saved)} process(es), resumed by {trainer.world_size}: random"
                " states are re-initialised, and the run will not equal an uninterrupted one bit for bit"
            )
        self._position.on_train_start(trainer)

    def _check_optimizers(self, trainer: Trainer) -> None:
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

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Correct the counters of a validation that was due."""
        if self._position is not None:
            self._position.on_validation_start(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the epoch in which the checkpoint was written."""
        if self._position is not None:
            self._position.on_train_epoch_end(trainer, pl_module)
            trainer.should_stop |= self._stopped
            self._position = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that everything is restored."""
        self.restoring = False

    def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
        """Note that everything is restored."""
        self.restoring = False

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that everything is restored."""
        self.restoring = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Complete the log and the metrics of a run without remaining steps."""
        self.restoring = False
        if self._restored:
            self._cut(trainer)
            saved, self._restored = self._restored, []
            _restore_metrics(trainer, saved[0])
            log_row(trainer, saved[0]["position"]["row"])

    def _cut(self, trainer: Trainer) -> None:
        """Delete everything that the run has written after the checkpoint."""
        if self.goes_on(trainer) and trainer.is_global_zero:
            assert self.directory is not None
            cut_checkpoints(self.directory, self._step)
            cut_rows(trainer, self._restored[0]["rows"] if self._restored else [])


def starts_new_run(trainer: Trainer) -> bool:
    """Return True if the run starts from the checkpoint of another run."""
    found = [each for each in callbacks_of(trainer, ExactResume) if each.directory is not None]
    return trainer.ckpt_path is not None and any(not each.goes_on(trainer) for each in found)


@contextmanager
def checked_restore(trainer: Trainer, checkpoint: Path | None) -> Iterator[None]:
    """Check a checkpoint before Lightning restores it, and name it if Lightning cannot restore it.

    This is done here, since not every strategy reads checkpoints through the trainer's plugin.

    Raises:
        PolicyError: In place of errors that are raised before training or testing begins.
    """
    if checkpoint is not None:
        check_checkpoint(checkpoint)
    try:
        yield
    except (PolicyError, MisconfigurationException):
        raise
    except Exception as error:
        if checkpoint is None or not any(each.restoring for each in callbacks_of(trainer, ExactResume)):
            raise
        # Python's own message about a wrong type would not be helpful.
        is_clear = isinstance(error, RuntimeError | ValueError)
        what = f" ({brief(str(error), most=120)})" if is_clear else ""
        raise PolicyError(
            f"{KEY}: {checkpoint} holds a state of another kind{what}: {CANNOT_RESUME}"
        ) from error


def _stoppers(trainer: Trainer) -> dict[str, EarlyStopping]:
    return {callback.state_key: callback for callback in callbacks_of(trainer, EarlyStopping)}


def _restore_metrics(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restore the metrics that were logged before."""
    trainer.callback_metrics.update(move_data_to_device(state["metrics"], trainer.strategy.root_device))


def _restore_rank(pl_module: LightningModule, state: dict[str, Any]) -> None:
    set_random_states(state["random"], pl_module.device)
    for name, parameter in pl_module.named_parameters():
        gradient = state.get("gradients", {}).get(plain_name(name))
        if gradient is not None:
            parameter.grad = torch.empty_like(parameter)
            local_shard(parameter.grad).copy_(gradient)


# ---- the global random states


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
