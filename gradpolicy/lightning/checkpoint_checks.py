"""Checks, before anything trains, that a checkpoint is of this model and that a run can resume from it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from packaging.version import InvalidVersion, Version
from torch import Tensor, nn

from gradpolicy.distributed.sharded_checkpoint import has_key, saved_shapes
from gradpolicy.errors import PolicyError, shortened, shown
from gradpolicy.lightning.checkpoint_reading import (
    KEY,
    SETTINGS,
    VERSION,
    WEIGHTS,
    check_checkpoint,
    read_checkpoint,
)
from gradpolicy.optim.update_rules import rule_for
from gradpolicy.tasks.task import Task

BY_INITIAL_WEIGHTS = "callbacks=[default,initial_weights] callbacks.initial_weights.path=…"
CANNOT_RESUME = f"a run cannot go on from it; begin a new one with its weights by {BY_INITIAL_WEIGHTS}"


def check_fits(path: Path, model: nn.Module, key: str = KEY) -> None:
    """Checks that a checkpoint is of this model: the same names, the same shapes, no infinite parameters.

    Args:
        path: The checkpoint.
        model: The model.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If it is damaged, or of another model.
    """
    content = read_checkpoint(path, key)
    saved = saved_shapes(path) if path.is_dir() else _shapes(content[WEIGHTS])
    wanted = _shapes(model.state_dict())
    lacking, surplus = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    reshaped = [
        f"{name} is {saved[name]} there and {wanted[name]} here"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    differences = [
        *([f"it lacks {shortened(lacking)}"] if lacking else []),
        *([f"it holds {shortened(surplus)}, which this model has not"] if surplus else []),
        *reshaped[:2],
    ]
    if differences:
        raise PolicyError(f"{key}: {path} is of another model: {'; '.join(differences)}")
    infinite = {*check_checkpoint(path, key).infinite} & {name for name, _ in model.named_parameters()}
    if infinite:
        raise PolicyError(f"{key}: {path} holds infinite values in {shortened(sorted(infinite))}")


def check_resumable(path: Path, key: str = KEY) -> None:
    """Checks that a checkpoint holds what a run needs to resume, besides weights.

    Args:
        path: The checkpoint.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If anything is missing, or is not what Lightning writes.
    """
    content = read_checkpoint(path, key)
    if path.is_dir() and has_key(path, "optimizer_0"):
        # The states of optimizers are among its shards.
        content = {"optimizer_states": [], **content}
    lacking = [name for name in RESUMED if name not in content]
    wrong = [name for name, is_right in RESUMED.items() if name in content and not is_right(content[name])]
    if lacking or wrong:
        what = f"holds no {' and no '.join(lacking)}" if lacking else f"holds {wrong[0]} of another kind"
        raise PolicyError(f"{key}: {path} {what}: {CANNOT_RESUME}")


def _is_version(value: Any) -> bool:
    try:
        return bool(Version(value))
    except (InvalidVersion, TypeError):
        return False


def _is_of_loops(value: Any) -> bool:
    fit = value.get("fit_loop") if isinstance(value, Mapping) else None
    # If one of these is absent, Lightning counts from zero again.
    parts = ("state_dict", "epoch_progress", "epoch_loop.batch_progress")
    return isinstance(fit, Mapping) and all(isinstance(fit.get(part), Mapping) for part in parts)


def _is_of_optimizers(value: Any) -> bool:
    return _is_of_schedulers(value) and all(
        _is_of_schedulers(state.get("param_groups")) and isinstance(state.get("state"), Mapping)
        for state in value
    )


def _is_of_schedulers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(state, Mapping) for state in value)


# What Lightning writes beside the weights and needs to resume, and a check of each value.
RESUMED: dict[str, Callable[[Any], bool]] = {
    "loops": _is_of_loops,
    "optimizer_states": _is_of_optimizers,
    "lr_schedulers": _is_of_schedulers,
    VERSION: _is_version,
}


def check_optimizer(model: LightningModule, checkpoint: Path | None) -> None:
    """Makes the optimizer once, and checks that it can resume from a checkpoint.

    Args:
        model: The model. Only the optimizer of a :class:`~gradpolicy.tasks.task.Task` is checked: other
            modules may make theirs in any way.
        checkpoint: What the run is resumed from; None if it is not.

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
    content = read_checkpoint(checkpoint)
    # In a directory they are among its shards.
    states: Any = content.get("optimizer_states", [{}])
    if len(states) != 1:
        raise PolicyError(
            f"ckpt_path: {checkpoint} holds the state of {len(states)} optimizers, and this run has one: "
            f"{CANNOT_RESUME}"
        )
    groups = states[0].get("param_groups", [])
    _check_entries(optimizer, groups, states[0].get("state", {}), checkpoint)
    # This fills in options that newer versions of torch have added, as loading a state does.
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
    if SETTINGS not in content and groups:
        _check_options(optimizer, groups[0], is_scheduled=bool(content.get("lr_schedulers")))


def setting_differs(key: str, here: str, there: str, more: str = "") -> PolicyError:
    """Says that the checkpoint decides a setting, and that the config has another value for it."""
    return PolicyError(
        f"{key}: {here} given, and the run that ckpt_path goes on with has {there}; leave it so{more}; a new "
        f"run begins with the weights alone by {BY_INITIAL_WEIGHTS}"
    )


def _check_options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, is_scheduled: bool) -> None:
    """Compares options with those in the checkpoint of another program, which holds no settings of the run.

    Raises:
        PolicyError: For the first that differs; not for one that a scheduler may have changed.
    """
    began = {**group, "lr": group.get("initial_lr", group.get("lr"))}
    for name, here in optimizer.defaults.items():
        if name not in group or (is_scheduled and not (name == "lr" and "initial_lr" in group)):
            continue
        if _plain(here) != _plain(began[name]):
            raise setting_differs(f"optimizer.{name}", shown(here), shown(_plain(began[name])))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _check_entries(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[int, Any],
    checkpoint: Path,
) -> None:
    """Checks that what an optimizer keeps for each parameter is of that parameter's size.

    Raises:
        PolicyError: If one is missing, or something else is in its place.
    """
    rule = rule_for(optimizer)
    for own, group in zip(optimizer.param_groups, groups, strict=False):
        names = () if rule is None else tuple(rule.state({**own, **group}))
        for number, parameter in zip(group.get("params", ()), own["params"], strict=False):
            state = states.get(number, {})
            wrong = _wrong_entry(state, names, parameter)
            if wrong is not None:
                raise PolicyError(
                    f"ckpt_path: {checkpoint} holds no usable {wrong} of the optimizer's parameter {number}: "
                    f"{CANNOT_RESUME}"
                )


def _wrong_entry(state: Any, names: Sequence[str], parameter: Tensor) -> str | None:
    """The name of what is not as a parameter's state should be; None if all is."""
    if not isinstance(state, Mapping):
        return "state"
    # What is frozen and dropped has none.
    if all(state.get(name) is None for name in names):
        return None
    sizes = {name: state[name].numel() for name in names if isinstance(state.get(name), Tensor)}
    return next((name for name in names if sizes.get(name) != parameter.numel()), None)


def _is_alike(value: Any, default: Any) -> bool:
    """Whether a saved option is of the same type as the optimizer's own."""
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int | float):
        return isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    if isinstance(default, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(default)
    return True


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
