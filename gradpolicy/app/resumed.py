"""Determines the run that a checkpoint continues, and continues its logs."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.app.config import Settings
from gradpolicy.app.processes import in_sweep, is_first_rank
from gradpolicy.errors import PolicyError, shown
from gradpolicy.insight.audit import Audit
from gradpolicy.insight.record import Record
from gradpolicy.train.lightning.checkpoints import BY_INITIAL_WEIGHTS, read_checkpoint
from gradpolicy.train.lightning.resume import starts_new_run
from gradpolicy.train.lightning.resumed_files import append_rows
from gradpolicy.train.lightning.runs import LAST, RunRecord, find_checkpoint, last_checkpoint, run_of, step_of

# The key of the settings in a checkpoint.
SETTINGS = "gradpolicy_settings"
# The argument of each logger that identifies a stored run.
LOGGER_IDS = {
    "CSVLogger": "version",
    "TensorBoardLogger": "version",
    "WandbLogger": "id",
    "MLFlowLogger": "run_id",
}


@dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a run continues or starts.

    Args:
        checkpoint: The checkpoint.
        directory: The directory of the run that is continued; None if this is a new run.
    """

    checkpoint: Path
    directory: Path | None

    def __str__(self) -> str:
        return f"{'a new run' if self.directory is None else 'going on'} from {self.checkpoint}"


def chosen_checkpoint(settings: Settings, own: Path | None) -> Path | None:
    """Return the checkpoint to resume from or to test; None if there is none.

    Args:
        settings: The config.
        own: The directory that the run must have; None if it may have any.
    """
    asked = settings.ckpt_path
    requeued = asked is None and int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
    if own is not None and (requeued or (asked == LAST and in_sweep())):
        found, bad = last_checkpoint(own)
        if found is None:
            rank_zero_warn("; ".join([f"{own} has no good checkpoint, so that this job starts", *bad]))
        return found
    return find_checkpoint(asked, Path(settings.paths.log_dir), task=settings.task_name, own=own)


def resumed_run(settings: Settings, checkpoint: Path, own: Path | None) -> Resumed:
    """Return the run that a checkpoint continues: the one that wrote it, unless another directory is named.

    Args:
        settings: The config.
        checkpoint: The checkpoint.
        own: The directory that the run must have; None if it may have any.

    Raises:
        PolicyError: If the run has another seed, or another class of model or data.
    """
    directory = run_of(checkpoint)
    if directory is None or (own is not None and own.resolve() != directory.resolve()):
        return Resumed(checkpoint, None)
    saved: Any = read_checkpoint(checkpoint).get(SETTINGS)
    for key, given in same_settings(settings).items():
        if isinstance(saved, Mapping) and saved.get(key, given) != given:
            raise PolicyError(
                f"{key}: {shown(given)} given, and the run that ckpt_path goes on with has"
                f" {shown(saved[key])}; a new run starts from its weights by {BY_INITIAL_WEIGHTS}"
            )
    return Resumed(checkpoint, directory)


def same_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that a run keeps whenever it is resumed, by key."""
    classes = {f"{key}._target_": getattr(settings, key).get("_target_") for key in ("data", "model")}
    return {"seed": settings.seed, **classes}


class RunState(Callback):
    """Saves in each checkpoint the settings that a resumed run must have.

    A new run from a checkpoint does not take over the record and the audit of the run that wrote it.

    Args:
        settings: The config of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = same_settings(settings)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the settings."""
        checkpoint[SETTINGS] = self.settings

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remove the record and the audit of another run."""
        if starts_new_run(trainer):
            checkpoint.pop(Audit.KEY, None)
            checkpoint["callbacks"].pop(Record.__name__, None)


# ---- loggers


def name_stored_runs(settings: Settings, resumed: Resumed) -> None:
    """Make each logger of a config continue its stored run."""
    record = RunRecord.load(resumed.directory) if resumed.directory is not None else None
    for name, node in (settings.logger or {}).items():
        kind = str((node or {}).get("_target_")).rpartition(".")[2]
        argument, stored = LOGGER_IDS.get(kind), (record.loggers if record else {}).get(name)
        if node and argument and re.fullmatch(r"[\w-]+", str(stored)) and node.get(argument) is None:
            node[argument] = stored
            if kind == "TensorBoardLogger":
                node["purge_step"] = step_of(resumed.checkpoint)


def append_to_stored_runs(loggers: Mapping[str, Logger]) -> None:
    """Make the loggers of a continued run append to its files."""
    for logger in loggers.values():
        if isinstance(logger, CSVLogger) and is_first_rank():
            append_rows(logger)


def stored_runs(loggers: Mapping[str, Logger]) -> dict[str, int | str]:
    """Return the ids of a run in its loggers."""
    return {
        name: version
        for name, logger in loggers.items()
        if type(logger).__name__ in LOGGER_IDS and (version := logger.version) is not None
    }
