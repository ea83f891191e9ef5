"""Determines the run that a checkpoint continues, and the settings that must not change."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.errors import PolicyError, brief, shown
from gradpolicy.insight.audit import Audit
from gradpolicy.insight.record import Record
from gradpolicy.insight.run_files import flat
from gradpolicy.launch.config import Settings
from gradpolicy.launch.processes import agreed, is_first_rank, under_torchrun
from gradpolicy.lightning.callback import GradientPolicies
from gradpolicy.lightning.checkpoints import BY_INITIAL_WEIGHTS, read_checkpoint
from gradpolicy.lightning.resume import append_rows, starts_new_run
from gradpolicy.lightning.runs import LAST, RunRecord, find_checkpoint, last_checkpoint, run_of, step_of

ABSENT = object()
# The key of the settings in a checkpoint.
SETTINGS = "gradpolicy_settings"
# Callbacks, each with the argument that its state in a checkpoint replaces.
RESTORED_ARGUMENTS = {"InitialWeights": "path", "EarlyStopping": "patience"}
# Groups whose change makes a new run. Settings below any other key are determined by the checkpoint.
NEW_RUN = ("data", "model", "policy")
# Arguments of models that the states of optimizers and schedulers replace.
OF_OPTIMIZERS = (
    "optimizer",
    "scheduler",
    "scheduler_interval",
    "lr",
    "learning_rate",
    "weight_decay",
)
# Arguments of data modules that change the speed of loading, not the batches.
NO_DIFFERENCE = ("workers", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "download")
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
        reason: The reason why it is a new run.
    """

    checkpoint: Path
    directory: Path | None
    reason: str = ""

    def __str__(self) -> str:
        if self.directory is not None:
            return f"going on from {self.checkpoint}"
        return (
            f"a new run from {self.checkpoint}, since {self.reason}; its optimizer goes on, the best scores"
            " begin anew"
        )


def chosen_checkpoint(settings: Settings, own: Path | None, *, in_sweep: bool = False) -> Path | None:
    """Return the checkpoint to resume from or to test, the same on all ranks; None if there is none.

    Args:
        settings: The config.
        own: The directory that the run must have; None if it may have any.
        in_sweep: True if the run is a job of a sweep, for which ``last`` means its own directory only.
    """
    asked = settings.ckpt_path
    if in_sweep and asked == LAST and settings.train and own is not None:
        found, bad = last_checkpoint(own)
        if found is None:
            rank_zero_warn(
                f"ckpt_path=last: {own} holds no good checkpoint; this job begins{'; '.join(['', *bad])}"
            )
        return found
    if asked is None and own is not None and int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0:
        # Slurm has requeued this job.
        return last_checkpoint(own)[0]

    def find() -> Path | None:
        return find_checkpoint(asked, Path(settings.paths.log_dir), task=settings.task_name, own=own)

    if asked != LAST or not under_torchrun():
        return find()
    # After a restart by torchrun, this is the last checkpoint of the previous process group.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return Path(agreed(f"gradpolicy/last/{restart}/{settings.paths.log_dir}", lambda: str(find())))


def resumed_run(settings: Settings, checkpoint: Path, own: Path | None) -> Resumed:
    """Return the run that a checkpoint continues: its own, if model, data and policies are the same.

    Args:
        settings: The config.
        checkpoint: The checkpoint.
        own: The directory that the run must have; None if it may have any.

    Raises:
        PolicyError: If the config changes a setting that the checkpoint determines.
    """
    saved: Any = read_checkpoint(checkpoint).get(SETTINGS)
    directory = run_of(checkpoint)
    if directory is None or not isinstance(saved, Mapping):
        where = (
            "it lies in no directory of a run" if directory is None else "it does not say of which settings"
        )
        return Resumed(checkpoint, None, where)
    reason = next(_differences(settings, saved), "")
    if own is not None and own.resolve() != directory.resolve():
        return Resumed(checkpoint, None, reason or f"{own} is another directory")
    if reason and own is not None:
        raise PolicyError(
            f"ckpt_path: {reason}: that is a new run, and {own} holds this one; name another directory"
        )
    return Resumed(checkpoint, None if reason else directory, reason)


# ---- settings


class SaveSettings(Callback):
    """Saves in each checkpoint the settings that are compared when a run is resumed from it.

    Args:
        settings: The config of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = compared_settings(settings)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add them."""
        checkpoint[SETTINGS] = self.settings

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remove state that a new run does not take over from the checkpoint of another run.

        These are the record, the audit, and the state of policies whose settings changed.
        """
        if not starts_new_run(trainer):
            return
        checkpoint.pop(Audit.KEY, None)
        checkpoint["callbacks"].pop(Record.__name__, None)
        saved = checkpoint.get(SETTINGS) or self.settings
        state = checkpoint["callbacks"].get(GradientPolicies.__name__, {}).get("freezer", {})
        for key in {*saved, *self.settings}:
            if str(key).startswith("policy.") and saved.get(key) != self.settings.get(key):
                for part in ("sources", "masks"):
                    state.get(part, {}).pop(str(key).split(".")[1], None)


def compared_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that are compared when a run is resumed, by key.

    Args:
        settings: The config.
    """
    callbacks = {
        name: {argument: node.get(argument)}
        for name, node in (settings.callbacks or {}).items()
        for kind, argument in RESTORED_ARGUMENTS.items()
        if node and str(node.get("_target_")).endswith(f".{kind}")
    }
    # It is under `optimizer`, to which it refers.
    model = {
        key: value
        for key, value in settings.model.items()
        if value != settings.optimizer or key != "optimizer"
    }
    data = {key: value for key, value in settings.data.items() if key not in NO_DIFFERENCE}
    compared = {"seed": settings.seed, "optimizer": settings.optimizer, "callbacks": callbacks}
    compared |= {"model": model, "data": data, "policy": settings.policy or {}}
    places = settings.paths.model_dump()
    longest_first = sorted(places, key=lambda name: len(str(places[name])), reverse=True)

    def placeless(value: Any) -> Any:
        """Return a text without paths of this machine, since a run may be moved."""
        for name in longest_first if isinstance(value, str) else ():
            value = value.replace(str(places[name]), f"${{paths.{name}}}")
        return value

    return {key: placeless(value) for key, value in flat(compared).items() if value != {}}


def _differences(settings: Settings, saved: Mapping[Any, Any]) -> Iterator[str]:
    """Yield each difference that makes a new run.

    Raises:
        PolicyError: At the first different setting that the checkpoint determines.
    """
    given = compared_settings(settings)
    found = []
    for key in sorted({*given, *map(str, saved)}):
        here, there = given.get(key, ABSENT), saved.get(key, ABSENT)
        group, _, name = key.partition(".")
        if here == there:
            continue
        if group in NEW_RUN and not (group == "model" and name.split(".")[0] in OF_OPTIMIZERS):
            found.append(f"{brief(key)} is {_told(here)} and was {_told(there)}")
        # Without the callback there is nothing to replace. One that is new begins without a state, but first
        # weights would be replaced by those of the checkpoint.
        elif group != "callbacks" or (key in given and (key in saved or key.endswith(".path"))):
            raise PolicyError(
                f"{brief(key)}: {_told(here)} given, and the run that ckpt_path goes on with has"
                f" {_told(there)}; leave it so; a new run begins with the weights alone by"
                f" {BY_INITIAL_WEIGHTS}"
            )
    yield from found


def _told(value: Any) -> str:
    return "nothing" if value is ABSENT else shown(value)


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
