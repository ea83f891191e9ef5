"""Makes a resumed run equal, bit for bit, to the run left alone."""

import random
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradpolicy.lightning.logged_values import (
    averages,
    copy_rows,
    log_row,
    pending_row,
    restore_averages,
    written_rows,
)
from gradpolicy.lightning.resume_point import allow_epoch_end, continue_after, moment
from gradpolicy.where import plain_name


class ExactResume(Callback):
    """Saves in each checkpoint what Lightning leaves out and a bit-exact resume needs.

    - the global random states (Python, NumPy, torch, the CUDA device) of every rank;
    - within an accumulation window, the gradients that every rank has accumulated;
    - the position of every rank's data loader, if the loader has one;
    - the point in Lightning's loops at which it was saved: see :mod:`gradpolicy.lightning.resume_point`;
    - the values that were about to be logged, and averages: see :mod:`gradpolicy.lightning.logged_values`;
    - whether early stopping had ended the run.

    If the data module is one of :mod:`gradpolicy.tasks` or its loader saves its position, and the optimizer
    restores its state, then a run that was ended at any moment and resumed from its last checkpoint ends with
    the same bits as the run left alone. Everything saved loads with ``weights_only=True``.
    """

    KEY = "gradpolicy_exact_resume"

    def __init__(self) -> None:
        self._restored: list[dict[str, Any]] = []
        self._loops: dict[str, Any] = {}
        self._max_steps = -1
        self._patience: dict[str, int] = {}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the state of every rank; Lightning calls this on all of them."""
        now = moment(trainer)
        state = {
            "random": random_states(pl_module.device),
            "moment": now,
            "should_stop": trainer.should_stop,
            "seen": move_data_to_device(dict(trainer.callback_metrics), "cpu"),
            "row": pending_row(trainer, now),
            "written": written_rows(trainer),
            "averages": averages(trainer, pl_module, now),
            "loaders": checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader"),
        }
        if trainer.fit_loop.epoch_loop._should_accumulate():
            state["gradients"] = _gradients(pl_module)
        checkpoint[self.KEY] = _of_every_rank(state, trainer.world_size)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the state until training starts. Lightning saved one rank's loaders: replaces them."""
        if trainer.state.fn is not TrainerFn.FITTING:
            return
        self._restored = checkpoint.get(self.KEY, [])
        self._patience = {key: stopper.patience for key, stopper in _stoppers(trainer).items()}
        self._loops = checkpoint["loops"]["fit_loop"]
        if len(self._restored) == trainer.world_size:
            loaders = self._restored[trainer.global_rank].get("loaders")
            if loaders is not None:
                self._loops["state_dict"]["combined_loader"] = loaders

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets a run that has taken its last step end its epoch."""
        self._max_steps = trainer.max_steps
        if self._restored:
            allow_epoch_end(trainer, self._restored[0]["moment"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores this rank's state, after all other hooks that run before the first batch."""
        saved, self._restored = self._restored, []
        if not saved:
            return
        same_ranks = len(saved) == trainer.world_size
        state = saved[trainer.global_rank if same_ranks else 0]
        copy_rows(trainer, state["written"])
        self._restore_stop(trainer, state)
        _restore_metrics(trainer, pl_module, state)
        if same_ranks:
            self._restore_rank(trainer, pl_module, state)
        else:
            rank_zero_warn(
                f"the checkpoint is of {len(saved)} process(es), resumed by {trainer.world_size}: random"
                " states start anew, and the run will not equal the one left alone bit for bit"
            )
        continue_after(
            trainer, state["moment"], self._loops, self._max_steps, lambda: log_row(trainer, state["row"])
        )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Completes the log and the metrics of a run that had no step left to take."""
        saved, self._restored = self._restored, []
        if saved:
            _restore_metrics(trainer, pl_module, saved[0])
            copy_rows(trainer, saved[0]["written"])
            log_row(trainer, saved[0]["row"])

    def _restore_stop(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Stops a run that early stopping had ended, unless its patience has been raised since."""
        stoppers = _stoppers(trainer)
        for key, stopper in stoppers.items():
            # Lightning has restored the patience of the run before.
            stopper.patience = self._patience[key]
        if state["should_stop"] and any(each.wait_count >= each.patience for each in stoppers.values()):
            trainer.should_stop = True

    def _restore_rank(self, trainer: Trainer, pl_module: LightningModule, state: dict[str, Any]) -> None:
        set_random_states(state["random"], pl_module.device)
        restore_averages(trainer, pl_module, state["averages"])
        for name, parameter in pl_module.named_parameters():
            gradient = state.get("gradients", {}).get(plain_name(name))
            if gradient is not None:
                parameter.grad = _like(parameter, gradient.to(parameter.device))


def _restore_metrics(trainer: Trainer, pl_module: LightningModule, state: dict[str, Any]) -> None:
    """Gives the trainer the metrics that were logged before."""
    seen = move_data_to_device(state["seen"], pl_module.device)
    trainer._logger_connector._callback_metrics.update(seen)


def _stoppers(trainer: Trainer) -> dict[str, EarlyStopping]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return {callback.state_key: callback for callback in callbacks if isinstance(callback, EarlyStopping)}


def random_states(device: torch.device) -> dict[str, Any]:
    """The global random states of this process, in tensors, numbers, strings and containers.

    Args:
        device: The process's own; that of a CUDA device has a state too.
    """
    version, words, spare = random.getstate()
    mersenne = np.random.get_state(legacy=False)
    keys = torch.from_numpy(mersenne["state"]["key"].astype(np.int64))
    states: dict[str, Any] = {
        "python": [version, torch.tensor(words), spare],
        "numpy": {**mersenne, "state": {"key": keys, "pos": mersenne["state"]["pos"]}},
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restores what `random_states` gave."""
    version, words, spare = states["python"]
    random.setstate((version, tuple(words.tolist()), spare))
    mersenne = states["numpy"]
    keys = mersenne["state"]["key"].cpu().numpy().astype(np.uint32)
    np.random.set_state({**mersenne, "state": {**mersenne["state"], "key": keys}})
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


def _gradients(pl_module: LightningModule) -> dict[str, Tensor]:
    """The gradients of this rank in an unfinished accumulation window; of sharded ones its shard."""
    gathered = {
        plain_name(name): parameter.grad
        for name, parameter in pl_module.named_parameters()
        if parameter.grad is not None
    }
    return {
        name: (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach().cpu()
        for name, gradient in gathered.items()
    }


def _like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient of which this rank holds its shard, sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return gradient
    return DTensor.from_local(
        gradient,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _of_every_rank(state: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    if ranks == 1:
        return [state]
    gathered: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(gathered, state)
    return gathered
