"""Runs in their directories: find a run, its checkpoints and its start weights."""

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from pydantic import Field

from gradpolicy.errors import PolicyError, brief, nearest
from gradpolicy.files import is_inside, read_json, write_json
from gradpolicy.tensors.checkpoint_file import check_kind
from gradpolicy.train.lightning.checkpoints import IS_DIRECTORY, KEY, load_weights, read_checkpoint
from gradpolicy.train.lightning.trainer_parts import callbacks_of

RECORD = "run.json"
LAST = "last"
Kind = Literal["run", "sweep"]
RUN: Kind = "run"
# A time in the year 3058, the latest that is accepted.
LAST_MOMENT = 2**35
PACKAGES = ("lightning", "numpy", "hydra-core")
INITIAL_WEIGHTS = "callbacks.initial_weights.path"


@dataclass(frozen=True)
class RunRecord:
    """The content of ``run.json``, by which a run is found and resumed.

    Args:
        task: The config's ``task_name``.
        kind: ``"run"``, or ``"sweep"`` for a job of a sweep or a trial of a study.
        started: The last time at which it started to train or test, in seconds since 1970.
        directory: The directory of the run; in a copy of the run, that of the original.
        versions: Versions of Python and of the packages that affect results.
        command: The command line of this run alone.
        started_in: The working directory of that command line.
        kept: The values of the config that the run keeps whenever it is resumed.
        loggers: The ids of the run in its loggers, by their names in the config.
        checkpoints: The checkpoints that the run has written below its directory, as paths from there. No
            other file in it is taken for a checkpoint of the run.
    """

    task: str
    kind: Kind
    started: Annotated[float, Field(ge=0, le=LAST_MOMENT)]
    directory: str
    versions: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    started_in: str = ""
    kept: dict[str, int | str] = field(default_factory=dict)
    loggers: dict[str, int | str] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)

    @staticmethod
    def begin(directory: Path, task: str, kind: Kind, command: list[str]) -> "RunRecord":
        """Return the record of a run that starts now."""
        versions = {
            "gradpolicy": sys.modules["gradpolicy"].__version__,
            "python": platform.python_version(),
            # With its build, which the metadata of torch's CUDA wheels lacks.
            "torch": str(torch.__version__),
            **{name: version(name) for name in PACKAGES},
        }
        now = datetime.now(UTC).timestamp()
        return RunRecord(task, kind, now, str(directory.absolute()), versions, command, str(Path.cwd()))

    def save(self) -> None:
        """Write it into the run's directory."""
        write_json(Path(self.directory) / RECORD, asdict(self))

    @staticmethod
    def load(directory: Path) -> "RunRecord | None":
        """Return the record in a directory; None if there is none, or it cannot be read."""
        try:
            return read_json(directory / RECORD, RunRecord)
        except (OSError, ValueError):
            return None


def own_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints that the record in a directory lists; some may have been deleted since.

    Without those to which a name or a link leads out of the directory.
    """
    record = RunRecord.load(directory)
    listed = [directory / name for name in record.checkpoints] if record is not None else []
    return sorted(path for path in listed if is_inside(path, directory))


def list_checkpoint(directory: Path, path: Path) -> None:
    """Add a checkpoint to the record in a directory, which is made if there is none."""
    directory = directory.absolute()
    name = os.path.relpath(path, directory)
    if name.split(os.sep)[0] == os.pardir:
        return
    record = RunRecord.load(directory) or RunRecord.begin(directory, "train", RUN, [])
    if name not in record.checkpoints:
        directory.mkdir(parents=True, exist_ok=True)
        left = [each for each in record.checkpoints if os.path.lexists(directory / each)]
        replace(record, directory=str(directory), checkpoints=[*left, name]).save()


# ---- finding a checkpoint


def find_checkpoint(
    ckpt_path: str | None, log_dir: Path, *, task: str | None = None, own: Path | None = None
) -> Path | None:
    """Return the checkpoint that `ckpt_path` names.

    Args:
        ckpt_path: None; a checkpoint; a run directory, which means its last checkpoint; or ``last``, which
            means that of the newest run. Jobs of sweeps and trials of studies are not considered.
        log_dir: The directory below which ``last`` searches for runs.
        task: The ``task_name`` of the runs that ``last`` considers; None: any.
        own: The directory of the run itself, which ``last`` means if it has checkpoints.

    Raises:
        PolicyError: If there is none.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == LAST:
        return _last_of([own] if own is not None and _checkpoints_in(own) else _runs(log_dir, task), log_dir)
    path = Path(ckpt_path).expanduser()
    # Not Path.exists, which raises if a name is too long for the file system.
    if os.path.isdir(path):
        if (path / ".metadata").exists():
            raise PolicyError(f"{KEY}: {path} {IS_DIRECTORY}")
        found, bad = last_checkpoint(path)
        if bad:
            rank_zero_warn(f"{KEY}: skipped: {'; '.join(bad)}")
        if found is None:
            raise PolicyError(f"ckpt_path: no good checkpoint in the directory {brief(str(path), most=120)}")
        return found
    if not os.path.exists(path):
        raise PolicyError(f"ckpt_path: {brief(str(path), most=120)} does not exist; {_near(path)}")
    check_kind(path, KEY)
    return path


def run_of(checkpoint: Path) -> Path | None:
    """Return the directory of the run that has written a checkpoint; None if there is none above it."""
    checkpoint = Path(os.path.abspath(checkpoint))
    return next((each for each in checkpoint.parents if checkpoint in own_checkpoints(each)), None)


def _last_of(candidates: Iterable[Path], log_dir: Path) -> Path:
    """Return the last checkpoint of the first run that has one; warn of newer ones that were skipped."""
    passed: list[str] = []
    for run in candidates:
        found, bad = last_checkpoint(run)
        passed += bad or ([] if found else [f"{run.name}, which holds no checkpoint"])
        if found is not None:
            if passed:
                rank_zero_warn(f"ckpt_path=last means {found}; skipped: {'; '.join(passed)}")
            return found
    hint = f"skipped: {'; '.join(passed)}" if passed else "jobs of sweeps go by their directories"
    raise PolicyError(f"ckpt_path=last: no good checkpoint below {log_dir}; {hint}")


def _runs(log_dir: Path, task: str | None) -> list[Path]:
    """Return the runs of a task below a directory, the newest first, without jobs of sweeps and trials."""
    found = []
    for path in log_dir.rglob(RECORD):
        record = RunRecord.load(path.parent)
        if record is not None and record.kind == RUN and task in (None, record.task):
            # The original comes before its copies.
            is_original = os.path.realpath(record.directory) == os.path.realpath(path.parent)
            found.append((record.started, is_original, str(path.parent)))
    return [Path(directory) for *_, directory in sorted(found, reverse=True)]


def last_checkpoint(directory: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to resume from in a directory, and the reasons for skipping others.

    It is the one with the most training steps of those named ``last*.ckpt``; if none is valid, of the others.
    """
    bad: list[str] = []
    good: list[tuple[bool, int, float, Path]] = []
    for path in _checkpoints_in(directory):
        try:
            named_last = path.name.lstrip(".").startswith(LAST)
            good.append((named_last, step_of(path), path.stat().st_mtime, path))
        except PolicyError as error:
            bad.append(str(error).removeprefix(f"{KEY}: "))
    return max(good)[-1] if good else None, bad


def step_of(checkpoint: Path) -> int:
    """Return the number of training steps of a checkpoint; -1 if it is not stored.

    Raises:
        PolicyError: If it cannot be read.
    """
    step = read_checkpoint(checkpoint).get("global_step")
    return step if isinstance(step, int) else -1


def _checkpoints_in(directory: Path) -> list[Path]:
    """Return the checkpoints of the run in a directory; if there is no run, those near the top."""
    if RunRecord.load(directory) is not None:
        return [path for path in own_checkpoints(directory) if os.path.lexists(path)]
    near = (directory, *(path for path in directory.glob("*") if os.path.isdir(path)))
    return sorted(path for parent in near for path in parent.glob("*.ckpt"))


def _near(path: Path) -> str:
    """Return a hint with the checkpoints beside a path that does not exist."""
    if not os.path.isdir(path.parent):
        parent = brief(str(path.parent), most=120)
        return f"there is no directory {parent} either; ckpt_path=last finds the newest"
    found = [candidate.name for candidate in path.parent.glob("*.ckpt")]
    return nearest(path.name, found, count=2) or "ckpt_path=last finds the newest"


# ---- the best checkpoint


def best_scores(trainer: Trainer) -> dict[str, float]:
    """Return the best value of each metric that a checkpoint callback monitors, under the name ``…_best``."""
    return {
        f"{callback.monitor}_best": float(callback.best_model_score)
        for callback in callbacks_of(trainer, ModelCheckpoint)
        if callback.monitor and callback.best_model_score is not None
    }


def best_checkpoint(trainer: Trainer) -> Path | None:
    """Return the best checkpoint of this run; None if there is none, which means the current weights."""
    kept = [callback for callback in callbacks_of(trainer, ModelCheckpoint) if callback.best_model_path]
    # A ModelCheckpoint without a metric keeps the newest checkpoint, not the best.
    kept.sort(key=lambda callback: callback.monitor is None)
    return Path(kept[0].best_model_path) if kept else None


# ---- the start weights


class InitialWeights(Callback):
    """Loads the weights of a checkpoint before training, for fine-tuning.

    Unlike a run resumed by ``ckpt_path``, the run starts at step 0 with an empty optimizer. If it is resumed
    later, it uses the weights of its own checkpoint.

    Args:
        path: A checkpoint; None starts from the current weights, with a warning.

    Raises:
        PolicyError: When training is set up, if it does not exist, is damaged, or is of another model.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load the weights, before strategies wrap the model and policies read it."""
        if stage != "fit":
            return
        if self.path is None:
            rank_zero_warn(f"{INITIAL_WEIGHTS} names no checkpoint: training starts from fresh weights")
            return
        path = Path(self.path).expanduser()
        if not path.is_file():
            wrong = IS_DIRECTORY if path.is_dir() else "is not a file"
            raise PolicyError(f"{INITIAL_WEIGHTS}: {path} {wrong}")
        load_weights(path, pl_module, INITIAL_WEIGHTS)
