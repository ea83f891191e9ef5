"""Copies the best checkpoints of a resumed run into its new directory, with their scores.

A resumed run usually writes into a directory of its own. Lightning then forgets the scores of the former one:
the next validation would count as the best, and other weights would be tested. Here the files are copied, and
the state that Lightning restores names the copies.
"""

import filecmp
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.distributed.sharded_checkpoint import MARKER, put_in_place, sync_folder
from gradpolicy.errors import PolicyError
from gradpolicy.lightning.checkpoint_reading import KEY, read_checkpoint

State = dict[str, Any]


class BestCheckpoints(Callback):
    """Lets each ``ModelCheckpoint`` continue as if the run had not been interrupted.

    Files are looked for beside the checkpoint that is resumed from, then where they were written. A file that
    is gone, damaged, or was overwritten after that checkpoint was saved no longer counts, and a warning says
    so. (A resumed run that repeats the steps writes an overwritten one again.)
    """

    KEY = "gradpolicy_deferred_saves"

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Records which callbacks have deferred a save until the next validation."""
        checkpoint[self.KEY] = {
            key: callback._defer_save_until_validation for key, callback in _kept(trainer).items()
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Copies the files, and changes the state that Lightning restores next. All ranks call this."""
        kept = _kept(trainer)
        states = checkpoint["callbacks"]
        if trainer.state.fn is not TrainerFn.FITTING:
            # A test must not change which checkpoint counts as the best.
            for key in kept:
                states.pop(key, None)
            return
        for key, deferred in checkpoint.get(self.KEY, {}).items():
            if key in kept:
                kept[key]._defer_save_until_validation = deferred
        local = {
            key: callback
            for key, callback in kept.items()
            if key in states and "://" not in f"{callback.dirpath}{states[key]['dirpath']}{trainer.ckpt_path}"
        }
        changed: dict[str, State] | OSError | PolicyError = {}
        if trainer.is_global_zero:
            try:
                former = FormerRun(Path(str(trainer.ckpt_path)), checkpoint)
                changed = {key: former.copy_files(key, callback) for key, callback in local.items()}
            except (OSError, PolicyError) as error:
                changed = error
        changed = trainer.strategy.broadcast(changed)
        if isinstance(changed, OSError | PolicyError):
            raise changed
        states.update(changed)
        for key, callback in local.items():
            # Saved by Lightning, but not restored.
            callback.current_score = states[key].get("current_score")


class FormerRun:
    """The files and states of the run that is resumed.

    Args:
        resumed_from: The checkpoint, where it is now.
        checkpoint: Its content.
    """

    def __init__(self, resumed_from: Path, checkpoint: Mapping[str, Any]) -> None:
        self.states: dict[str, State] = checkpoint["callbacks"]
        self.step: int = checkpoint["global_step"]
        self.folder = resumed_from.absolute().parent
        self.former_folder = self._folder_of(resumed_from.name)

    def copy_files(self, key: str, callback: ModelCheckpoint) -> State:
        """Copies a callback's files into its new directory, and gives its state with the new paths.

        Args:
            key: The callback's key in the checkpoint.
            callback: The callback, which has restored nothing yet.

        Raises:
            PolicyError: If a file would overwrite the checkpoint of another run.
        """
        state = self.states[key]
        folder = Path(str(callback.dirpath))
        here: dict[str, str] = {}
        for path in _paths(state):
            name = os.path.relpath(path, state["dirpath"])
            target = folder / name
            found, problem = self._find(path, key, name)
            if problem and path in state["best_k_models"]:
                score = f"{callback.monitor} {float(state['best_k_models'][path]):.4g}"
                rank_zero_warn(
                    f"{name} ({score}) of the run that is resumed {problem}: it does not count among the best"
                )
            elif not problem or _is_same(found, target):
                # A file that is already there stays, even if it has been overwritten since.
                _refuse_to_overwrite(found, target, callback)
                copy_whole(found, target)
                here[path] = str(target)
        return _for_here(state, here, callback)

    def _folder_of(self, name: str) -> str:
        """The directory in which a checkpoint of that name was written."""
        for state in self.states.values():
            for path in _paths(state):
                if os.path.basename(path) == name:
                    return os.path.dirname(path)
        return next((state["dirpath"] for state in self.states.values() if "dirpath" in state), "")

    def _find(self, path: str, key: str, name: str) -> tuple[Path, str]:
        """Where a file is now, and what is wrong with it."""
        beside = Path(os.path.normpath(self.folder / os.path.relpath(path, self.former_folder)))
        problem = self._problem(beside, key, name)
        elsewhere = Path(path)
        if problem and not self._problem(elsewhere, key, name):
            return elsewhere, ""
        return beside, problem

    def _problem(self, found: Path, key: str, name: str) -> str:
        """Why a file is not the one that the state names; empty if it is."""
        if name.split(os.sep)[0] == os.pardir:
            return "lies outside of its directory"
        if not (found.is_file() or found.is_dir()):
            return "is gone"
        try:
            content = read_checkpoint(found, key=name)
        except PolicyError as error:
            return f"cannot be used ({error})"
        state, own = self.states[key], content.get("callbacks", {}).get(key)
        score = _scores(state).get(name)
        # A checkpoint of weights alone records its step, but no score.
        same = own is None or score is None or _scores(own).get(name) == score
        return "" if same and content["global_step"] <= self.step else "was overwritten later"


def copy_whole(source: Path, target: Path) -> None:
    """Copies a checkpoint, file or directory; until the copy is complete the target stays as it was."""
    if _is_same(source, target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        part = target.with_name(f".{target.name}.copied")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part, ignore=shutil.ignore_patterns(MARKER))
        if (source / MARKER).exists():
            shutil.copy(source / MARKER, part)
        put_in_place(part, target)
        return
    part = target.with_name(f".{target.name}.part")
    with source.open("rb") as original, part.open("wb") as copy:
        shutil.copyfileobj(original, copy)
        copy.flush()
        os.fsync(copy.fileno())
    os.replace(part, target)
    sync_folder(target.parent)


def _refuse_to_overwrite(source: Path, target: Path, callback: ModelCheckpoint) -> None:
    """Refuses a target, named by a checkpoint, that would replace a file of another run."""
    written = {
        f"{name}{callback.FILE_EXTENSION}" for name in (callback.filename, callback.CHECKPOINT_NAME_LAST)
    }
    if target.name in written or not target.exists() or _is_same(source, target):
        return
    if source.is_dir() or target.is_dir() or not filecmp.cmp(source, target, shallow=False):
        raise PolicyError(
            f"{KEY}: {target} exists already and is of another run; choose another directory for this run"
        )


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _kept(trainer: Trainer) -> dict[str, ModelCheckpoint]:
    return {
        callback.state_key: callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    }


def _paths(state: State) -> Iterable[str]:
    """The checkpoints that a callback knows of."""
    named = (state.get("best_model_path"), state.get("last_model_path"), *state.get("best_k_models", ()))
    return dict.fromkeys(path for path in named if path)


def _scores(state: State) -> dict[str, float]:
    return {
        os.path.relpath(path, state["dirpath"]): float(score)
        for path, score in state["best_k_models"].items()
    }


def _for_here(state: State, here: Mapping[str, str], callback: ModelCheckpoint) -> State:
    """A callback's state with the paths of the files that were copied."""
    named = {
        name: here.get(state.get(name, ""), "")
        for name in ("best_model_path", "last_model_path", "kth_best_model_path")
    }
    scores = {here[path]: score for path, score in state["best_k_models"].items() if path in here}
    moved = {**state, **named, "dirpath": callback.dirpath, "best_k_models": scores}
    if len(scores) == len(state["best_k_models"]):
        return moved
    best = (min if callback.mode == "min" else max)(scores, key=scores.__getitem__, default="")
    fewer = {
        "best_model_path": best,
        "best_model_score": scores.get(best),
        # One more can be kept before the worst is deleted.
        "kth_best_model_path": "",
        "kth_value": callback.kth_value,
    }
    return {**moved, **fewer}


def best_scores(trainer: Trainer) -> dict[str, float]:
    """The best value of each metric that a checkpoint callback watches, under the name ``…_best``."""
    return {
        f"{callback.monitor}_best": float(callback.best_model_score)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
        and callback.monitor
        and callback.best_model_score is not None
    }


def best_checkpoint(trainer: Trainer) -> Path | None:
    """The best checkpoint of this run; None if none was kept, which means the weights as they are."""
    kept = [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.best_model_path
    ]
    # One that watches no metric keeps the newest, not the best.
    kept.sort(key=lambda callback: callback.monitor is None)
    return Path(kept[0].best_model_path) if kept else None
