"""Finds the run that a checkpoint continues, its command line, and its logs."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.app.build import build_all
from gradpolicy.app.config import Settings
from gradpolicy.app.processes import in_sweep, is_first_rank, quoted
from gradpolicy.errors import PolicyError, shown
from gradpolicy.train.lightning.checkpoints import BY_INITIAL_WEIGHTS
from gradpolicy.train.lightning.resumed_files import append_rows
from gradpolicy.train.lightning.runs import LAST, RunRecord, find_checkpoint, last_checkpoint, run_of, step_of

# The argument of each logger that identifies a stored run.
LOGGER_IDS = {
    "CSVLogger": "version",
    "TensorBoardLogger": "version",
    "WandbLogger": "id",
    "MLFlowLogger": "run_id",
}


@dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a run continues or starts, or which it tests.

    Args:
        checkpoint: The checkpoint.
        directory: The directory of the run that is continued; None if this is a new run.
    """

    checkpoint: Path
    directory: Path | None

    def __str__(self) -> str:
        return f"{'a new run' if self.directory is None else 'going on'} from {self.checkpoint}"


def _chosen_checkpoint(settings: Settings, own: Path | None) -> Path | None:
    """Return the checkpoint to resume from or to test; None if there is none."""
    asked = settings.ckpt_path
    requeued = asked is None and int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
    if own is not None and (requeued or (asked == LAST and in_sweep())):
        found, bad = last_checkpoint(own)
        if found is None:
            rank_zero_warn("; ".join([f"{own} has no good checkpoint, so that this job starts", *bad]))
        return found
    return find_checkpoint(asked, Path(settings.paths.log_dir), task=settings.task_name, own=own)


def resumed_run(settings: Settings, own: Path | None) -> Resumed | None:
    """Return the checkpoint that the config names, and its run; None if it names none.

    Training continues the run that wrote the checkpoint, unless another directory is named.

    Args:
        settings: The config.
        own: The directory that the run must have; None if it may have any.

    Raises:
        PolicyError: If there is no such checkpoint, or its run has another seed, or another class of model or
            data.
    """
    checkpoint = _chosen_checkpoint(settings, own)
    if checkpoint is None:
        return None
    directory = run_of(checkpoint) if settings.train else None
    if directory is None or (own is not None and own.resolve() != directory.resolve()):
        return Resumed(checkpoint, None)
    record = RunRecord.load(directory)
    for key, given in kept(settings).items():
        saved = record.kept.get(key, given) if record is not None else given
        if saved != given:
            raise PolicyError(
                f"{key}: {shown(given)} given, and the run that ckpt_path goes on with has {shown(saved)};"
                f" a new run starts from its weights by {BY_INITIAL_WEIGHTS}"
            )
    return Resumed(checkpoint, directory)


def kept(settings: Settings) -> dict[str, int | str]:
    """Return what a run keeps whenever it is resumed."""
    targets = {"data._target_": settings.data, "model._target_": settings.model}
    return {"seed": settings.seed, **{key: str(node.get("_target_")) for key, node in targets.items()}}


def command_of(named: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return the command line that resumes a run, and change to the working directory of its first one.

    Args:
        named: The directory of the run; empty: the newest run.
        changes: Overrides that the resumed run has besides.

    Raises:
        PolicyError: If there is no such run.
    """
    if len(named) > 1:
        raise PolicyError(f"resume: takes one directory of a run, got {', '.join(named)}")
    is_run = not named or Path(named[0]).is_dir()
    checkpoint = find_checkpoint(named[0] if named else LAST, Path("outputs")) if is_run else None
    run = None if checkpoint is None else run_of(checkpoint)
    record = None if run is None else RunRecord.load(run)
    if run is None or record is None:
        raise PolicyError(f"resume: {named[0]} is no directory of a run")
    resumed = f"ckpt_path={quoted(str(run.absolute()))}"
    if Path(record.started_in).is_dir():
        os.chdir(record.started_in)
    return [*(each for each in record.command if not each.startswith("ckpt_path=")), *changes, resumed]


# ---- loggers


def run_loggers(settings: Settings, resumed: Resumed | None) -> dict[str, Logger]:
    """Build the loggers of a config; those of a run that is continued go on with what they stored."""
    if resumed is None or resumed.directory is None:
        return build_all(settings.logger, "logger", Logger)
    record = RunRecord.load(resumed.directory)
    nodes = {name: dict(node) for name, node in (settings.logger or {}).items() if node is not None}
    for name, node in nodes.items():
        kind = str(node.get("_target_")).rpartition(".")[2]
        argument, stored = LOGGER_IDS.get(kind), (record.loggers if record else {}).get(name)
        if argument and re.fullmatch(r"[\w-]+", str(stored)) and node.get(argument) is None:
            node[argument] = stored
            if kind == "TensorBoardLogger":
                node["purge_step"] = step_of(resumed.checkpoint)
    loggers = build_all(nodes, "logger", Logger)
    for logger in loggers.values():
        if isinstance(logger, CSVLogger) and is_first_rank():
            append_rows(logger)
    return loggers


def stored_runs(loggers: Mapping[str, Logger]) -> dict[str, int | str]:
    """Return the ids of a run in its loggers."""
    return {
        name: version
        for name, logger in loggers.items()
        if type(logger).__name__ in LOGGER_IDS and (version := logger.version) is not None
    }
