"""Checks, before anything trains, that the optimizer can be made and that a checkpoint's state is its own."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from gradpolicy.errors import PolicyError, shortened, shown
from gradpolicy.lightning.find_checkpoint import CANNOT_RESUME, read_checkpoint
from gradpolicy.tasks.task import Task


def check_optimizer(model: LightningModule, checkpoint: Path | None) -> None:
    """Makes the optimizer once, and looks whether it could go on from a checkpoint.

    Args:
        model: The model. Only that of a :class:`~gradpolicy.tasks.task.Task` is checked: others make theirs
            in ways of their own.
        checkpoint: What the run is resumed from, if anything.

    Raises:
        PolicyError: For arguments that the optimizer refuses, or a checkpoint of another kind of optimizer.
    """
    if not isinstance(model, Task):
        return
    try:
        optimizer = model.make_optimizer(model.parameters())
    except (TypeError, ValueError) as error:
        raise PolicyError(f"optimizer: {error}") from error
    if checkpoint is not None:
        _check_state(optimizer, checkpoint)


def _check_state(optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    # Those of a directory are among its shards.
    states: Any = read_checkpoint(checkpoint).get("optimizer_states", [{}])
    if len(states) != 1:
        raise PolicyError(
            f"ckpt_path: {checkpoint} holds the state of {len(states)} optimizers, and this run has one: "
            f"{CANNOT_RESUME}"
        )
    groups = states[0].get("param_groups", [])
    # What newer versions of torch have added is filled in here, as it is when a state is loaded.
    optimizer.__setstate__({"state": {}, "param_groups": [{**group, "params": []} for group in groups]})
    lacking = [name for name in optimizer.defaults for group in optimizer.param_groups if name not in group]
    if lacking:
        raise PolicyError(
            f"ckpt_path: {checkpoint} was written with another optimizer than {type(optimizer).__name__}: "
            f"its state has no {shortened(list(dict.fromkeys(lacking)))}; resume with that run's optimizer; "
            f"under this one {CANNOT_RESUME}"
        )
    for group in groups:
        for name, value in group.items():
            if not _is_alike(value, optimizer.defaults.get(name)):
                raise PolicyError(
                    f"ckpt_path: {checkpoint} holds {shown(value)} as the optimizer's {name}: {CANNOT_RESUME}"
                )


def _is_alike(value: Any, default: Any) -> bool:
    """Whether a saved option may stand where the optimizer has another one."""
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int | float):
        return isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    if isinstance(default, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(default)
    return True
