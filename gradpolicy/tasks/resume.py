"""Makes a resumed run go on as the undisturbed one would have: random states, and gradients half gathered."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradpolicy.where import plain_name


class ExactResume(Callback):
    """Saves in each checkpoint what Lightning leaves out and a bit-exact resume needs.

    - the global random states (Python, NumPy, torch, the CUDA device) of every rank, put back when training
      goes on;
    - within an accumulation window, the gradients gathered so far, of every rank.

    With a data module of :mod:`gradpolicy.tasks` and an optimizer that restores its state, a run that was
    ended at any moment and resumed from its last checkpoint ends with the same bits as one left alone.
    Everything saved loads with ``weights_only=True``.
    """

    KEY = "gradpolicy_exact_resume"

    def __init__(self) -> None:
        self._restored: list[dict[str, Any]] = []

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the state of every rank; Lightning calls this on all of them."""
        state: dict[str, Any] = {"random": random_states(pl_module.device)}
        if trainer.state.fn is TrainerFn.FITTING and trainer.fit_loop.epoch_loop._should_accumulate():
            state["gradients"] = _gradients(pl_module)
        checkpoint[self.KEY] = _of_every_rank(state, trainer.world_size)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the state until training starts."""
        if trainer.state.fn is TrainerFn.FITTING:
            self._restored = checkpoint.get(self.KEY, [])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts this rank's state back: the last thing before the first batch."""
        saved, self._restored = self._restored, []
        if not saved:
            return
        if len(saved) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint is of {len(saved)} process(es), resumed by {trainer.world_size}: random"
                " states start anew, the run will not equal the undisturbed one bit for bit"
            )
            return
        state = saved[trainer.global_rank]
        set_random_states(state["random"], pl_module.device)
        for name, parameter in pl_module.named_parameters():
            gradient = state.get("gradients", {}).get(plain_name(name))
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device)


def random_states(device: torch.device | None = None) -> dict[str, Any]:
    """The global random states of this process, in tensors, numbers, strings and containers.

    Args:
        device: The CUDA device whose state is wanted as well.
    """
    version, words, spare = random.getstate()
    mersenne = np.random.get_state(legacy=False)
    keys = torch.from_numpy(mersenne["state"]["key"].astype(np.int64))
    states: dict[str, Any] = {
        "python": [version, torch.tensor(words), spare],
        "numpy": {**mersenne, "state": {"key": keys, "pos": mersenne["state"]["pos"]}},
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device | None = None) -> None:
    """Puts back what `random_states` gave."""
    version, words, spare = states["python"]
    random.setstate((version, tuple(words.tolist()), spare))
    mersenne = states["numpy"]
    keys = mersenne["state"]["key"].cpu().numpy().astype(np.uint32)
    np.random.set_state({**mersenne, "state": {**mersenne["state"], "key": keys}})
    torch.set_rng_state(states["torch"].cpu())
    if device is not None and device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


def _gradients(pl_module: LightningModule) -> dict[str, Tensor]:
    """What this rank has gathered in an unfinished accumulation window."""
    gathered = {
        plain_name(name): parameter.grad
        for name, parameter in pl_module.named_parameters()
        if parameter.grad is not None
    }
    if any(isinstance(gradient, DTensor) for gradient in gathered.values()):
        rank_zero_warn(
            "this checkpoint lies within an accumulation window, whose sharded gradients are not saved: a run"
            " resumed from it will not equal the undisturbed one; save after a whole window"
        )
        return {}
    return {name: gradient.detach().cpu() for name, gradient in gathered.items()}


def _of_every_rank(state: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    if ranks == 1:
        return [state]
    gathered: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(gathered, state)
    return gathered
