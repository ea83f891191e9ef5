"""The files of a run that is resumed, as they were at its checkpoint."""

import csv
import os
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.errors import PolicyError
from gradpolicy.files import atomic_open, is_inside
from gradpolicy.train.lightning.checkpoints import PATHS
from gradpolicy.train.lightning.runs import own_checkpoints, run_of, step_of
from gradpolicy.train.lightning.trainer_parts import callbacks_of


def goes_on(trainer: Trainer, directory: Path) -> bool:
    """Return True if the checkpoint that is resumed is one of the run in a directory."""
    run = None if trainer.ckpt_path is None else run_of(Path(str(trainer.ckpt_path)))
    return run is not None and run.resolve() == directory.resolve()


def cut(trainer: Trainer, directory: Path, step: int, rows: list[int]) -> None:
    """Delete what the run in a directory has written after a checkpoint, if it goes on from there.

    Args:
        trainer: The trainer.
        directory: The directory.
        step: The step of the checkpoint.
        rows: The number of lines of each CSVLogger's file then.
    """
    if goes_on(trainer, directory) and trainer.is_global_zero:
        cut_checkpoints(directory, step)
        cut_rows(trainer, rows)


# ---- checkpoints


def cut_checkpoints(directory: Path, step: int) -> None:
    """Delete the checkpoints of the run in a directory that were saved after the given step."""
    for path in own_checkpoints(directory):
        try:
            is_later = step_of(path) > step
        except PolicyError:
            continue
        if is_later:
            path.unlink()


def restore_callbacks(trainer: Trainer, states: dict[str, Any], step: int, directory: Path | None) -> None:
    """Change the saved states of ModelCheckpoints and EarlyStoppings; all ranks call this.

    A run that continues in its directory goes on with the checkpoints there. A new run starts without those
    states, and a test without those of ModelCheckpoints.

    Args:
        trainer: The trainer.
        states: The saved states of its callbacks.
        step: The step of the checkpoint.
        directory: The directory of the run; None: states for training are not changed.
    """
    fits = trainer.state.fn is TrainerFn.FITTING
    if fits and directory is None:
        return
    kept = {each.state_key: each for each in callbacks_of(trainer, ModelCheckpoint)}
    if not fits or directory is None or not goes_on(trainer, directory):
        stoppers = [each.state_key for each in callbacks_of(trainer, EarlyStopping)]
        for key in (*kept, *(stoppers if fits else ())):
            states.pop(key, None)
        return
    for key, callback in kept.items():
        if key in states and "://" not in f"{callback.dirpath}{states[key]['dirpath']}":
            here = _state_here(states[key], callback, step, directory) if trainer.is_global_zero else None
            states[key] = trainer.strategy.broadcast(here)
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
    # The record lists none outside the directory of the run, where the config may have put them.
    own = {path.resolve() for path in own_checkpoints(directory)} if is_inside(folder, directory) else None
    here: dict[str, str] = {}
    for path in {each for each in (*map(state.get, PATHS), *scores) if each}:
        name = os.path.relpath(path, state["dirpath"])
        found = folder / name
        # Lightning deletes what it takes for outdated.
        if not is_inside(found, folder) or (own is not None and found.resolve() not in own):
            continue
        try:
            if step_of(found) <= step:
                here[path] = str(found)
        except PolicyError as error:
            if path in scores:
                score = f"{callback.monitor} {float(scores[path]):.4g}"
                rank_zero_warn(f"{error}: {name} ({score}) does not count among the best checkpoints")
    named: dict[str, Any] = {name: here.get(state.get(name, ""), "") for name in PATHS}
    left = {here[path]: score for path, score in scores.items() if path in here}
    if len(left) < len(scores):
        best = (min if callback.mode == "min" else max)(left, key=left.__getitem__, default="")
        named |= {"best_model_path": best, "best_model_score": left.get(best)}
    return {**state, **named, "dirpath": callback.dirpath, "best_k_models": left}


# ---- rows of a CSVLogger


def append_rows(logger: CSVLogger) -> None:
    """Make a CSVLogger append to the file of its version, which Lightning would delete."""
    path = Path(logger.log_dir) / "metrics.csv"
    aside = path.with_name(".metrics.csv.kept")
    if path.is_file():
        os.replace(path, aside)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Previous log files in this directory will be deleted")
        writer = logger.experiment
    if aside.is_file():
        os.replace(aside, path)
        with path.open(newline="", encoding="utf-8") as file:
            writer.metrics_keys = next(csv.reader(file), [])


def count_rows(trainer: Trainer) -> list[int]:
    """Return the number of lines in the file of each CSVLogger."""
    return [len(_lines(path)) for path in _csv_files(trainer)]


def cut_rows(trainer: Trainer, numbers: list[int]) -> None:
    """Truncate the file of each CSVLogger to its first lines, and keep the names of its columns."""
    for path, number in zip(_csv_files(trainer), numbers, strict=False):
        lines = _lines(path)
        if len(lines) < number:
            rank_zero_warn(f"{path} lacks rows of the steps before the checkpoint")
        elif len(lines) > max(number, 1):
            with atomic_open(path, "wb") as file:
                file.writelines(lines[: max(number, 1)])


def _csv_files(trainer: Trainer) -> list[Path]:
    """Return the file of each CSVLogger on the first rank, with all rows in it."""
    loggers = [each for each in trainer.loggers if isinstance(each, CSVLogger) and trainer.is_global_zero]
    for logger in loggers:
        logger.save()
    return [Path(logger.experiment.metrics_file_path) for logger in loggers]


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.is_file() else []
