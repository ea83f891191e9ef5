"""Restores the state of ModelCheckpoints in a directory that may have been moved or copied."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.atomic_file import is_inside
from gradpolicy.errors import PolicyError
from gradpolicy.train.lightning.checkpoints import PATHS
from gradpolicy.train.lightning.runs import own_checkpoints, step_of
from gradpolicy.train.lightning.trainer_parts import callbacks_of


def kept_by(trainer: Trainer) -> dict[str, ModelCheckpoint]:
    """Return the ModelCheckpoints of a trainer by the keys of their states."""
    return {callback.state_key: callback for callback in callbacks_of(trainer, ModelCheckpoint)}


def restore_kept(trainer: Trainer, states: dict[str, Any], step: int, directory: Path) -> None:
    """Update the state of each ModelCheckpoint by the checkpoints in a directory; all ranks call this.

    Args:
        trainer: The trainer.
        states: The saved states of its callbacks, which are changed.
        step: The step of the checkpoint from which the run continues.
        directory: The directory of the run.
    """
    kept = {
        key: each
        for key, each in kept_by(trainer).items()
        if key in states and "://" not in f"{each.dirpath}{states[key]['dirpath']}"
    }
    here: dict[str, Any] = {}
    if trainer.is_global_zero:
        here = {key: _state_here(states[key], each, step, directory) for key, each in kept.items()}
    states.update(trainer.strategy.broadcast(here))
    for key, callback in kept.items():
        # Lightning saves the score, but does not restore it.
        callback.current_score = states[key].get("current_score")


def _state_here(
    state: dict[str, Any], callback: ModelCheckpoint, step: int, directory: Path
) -> dict[str, Any]:
    """Return a ModelCheckpoint's state with paths in its directory, which may have been moved or copied.

    Without checkpoints that are missing, damaged, of another run, or were overwritten after `step`; the
    resumed run, which repeats those steps, writes the latter again.
    """
    folder, scores = Path(str(callback.dirpath)), state["best_k_models"]
    own = {path.resolve() for path in own_checkpoints(directory)}

    def is_own(path: Path) -> bool:
        # The record lists none outside the directory of the run, where the config may have put them.
        known = path.resolve() in own or not is_inside(folder, directory)
        return known and is_inside(path, folder)

    here: dict[str, str] = {}
    named: dict[str, Any]
    for path in {each for each in (*map(state.get, PATHS), *scores) if each}:
        name = os.path.relpath(path, state["dirpath"])
        try:
            # Lightning deletes what it takes for outdated.
            if is_own(folder / name) and step_of(folder / name) <= step:
                here[path] = str(folder / name)
        except PolicyError as error:
            if path in scores:
                score = f"{callback.monitor} {float(scores[path]):.4g}"
                rank_zero_warn(f"{error}: {name} ({score}) does not count among the best checkpoints")
    named = {name: here.get(state.get(name, ""), "") for name in PATHS}
    left = {here[path]: score for path, score in scores.items() if path in here}
    if len(left) < len(scores):
        best = (min if callback.mode == "min" else max)(left, key=left.__getitem__, default="")
        named |= {"best_model_path": best, "best_model_score": left.get(best)}
    return {**state, **named, "dirpath": callback.dirpath, "best_k_models": left}
