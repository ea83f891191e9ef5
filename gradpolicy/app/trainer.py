"""Builds the trainer of a run, with the callbacks that every run has."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy

from gradpolicy.app.config import Settings
from gradpolicy.app.processes import exit_with_ranks
from gradpolicy.app.resume import Resumed, append_to_stored_runs, name_stored_runs, stored_runs
from gradpolicy.app.run_directory import RunDirectory
from gradpolicy.app.targets import build, build_all
from gradpolicy.errors import PolicyError
from gradpolicy.train.lightning.callback import GradientPolicies
from gradpolicy.train.lightning.checkpoints import AtomicCheckpointIO
from gradpolicy.train.lightning.resume import ExactResume
from gradpolicy.train.lightning.runs import RunRecord
from gradpolicy.train.lightning.trainer_parts import check_weight_averaging


class RunBegins(Callback):
    """Writes the run's record, and keeps its directory once the run has trained a step or tested.

    Args:
        directory: The directory.
        record: The record, without the ids of the run in its loggers; written once.
        loggers: The loggers by their names in the config.
    """

    def __init__(self, directory: RunDirectory, record: RunRecord, loggers: Mapping[str, Logger]) -> None:
        self.directory, self.loggers = directory, loggers
        self.record: RunRecord | None = record

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the record, now that the loggers have started."""
        if trainer.is_global_zero and self.record is not None:
            replace(self.record, loggers=stored_runs(self.loggers)).save()
        # The checkpoints are added to the file.
        self.record = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handler of SIGTERM, in which a rank waits for ranks that wait for it."""
        exit_with_ranks(trainer.strategy.launcher)

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Keep the directory after the first step."""
        self.directory.started = True

    def on_test_end(self, *arguments: Any) -> None:
        """Keep the directory after a test."""
        self.directory.started = True


def build_trainer(
    settings: Settings,
    policies: GradientPolicies,
    directory: RunDirectory,
    record: RunRecord,
    *others: Callback,
    resumed: Resumed | None = None,
) -> Trainer:
    """Build the trainer, with the callbacks and plugins that every run has.

    Args:
        settings: The config.
        policies: The policies.
        directory: The run directory.
        record: The record of the run.
        others: Further callbacks.
        resumed: The checkpoint from which training continues; None for a new run.

    Raises:
        PolicyError: If the strategy is DeepSpeed's.
    """
    node = dict(settings.trainer)
    chosen = _chosen_callbacks(settings)
    check_weight_averaging(chosen, policies.policies)
    if resumed is not None:
        name_stored_runs(settings, resumed)
    loggers = build_all(settings.logger, "logger", Logger)
    if resumed is not None and resumed.directory is not None:
        append_to_stored_runs(loggers)
    callbacks = [
        ExactResume(directory.path),
        *chosen,
        policies,
        RunBegins(directory, record, loggers),
        *others,
    ]
    plugins = build_plugins(node.pop("plugins", None))
    trainer: Trainer = build(
        node,
        "trainer",
        Trainer,
        callbacks=callbacks,
        logger=list(loggers.values()) or False,
        plugins=plugins,
    )
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        raise PolicyError(
            "trainer.strategy: DeepSpeed writes directories, which a run cannot check and resume from; use "
            "trainer=fsdp2, or give gradpolicy.GradientPolicies to a Trainer of your own"
        )
    return trainer


def _chosen_callbacks(settings: Settings) -> list[Callback]:
    """Build the config's callbacks, without those that the trainer's flags disable, and a progress bar."""
    # Lightning raises an error for callbacks that its own flags disable.
    switches = {"enable_progress_bar": ProgressBar, "enable_checkpointing": Checkpoint}
    off = tuple(kind for switch, kind in switches.items() if settings.trainer.get(switch) is False)
    built = build_all(settings.callbacks, "callbacks", Callback).values()
    chosen = [callback for callback in built if not isinstance(callback, off)]
    if ProgressBar not in off and not any(isinstance(callback, ProgressBar) for callback in chosen):
        chosen.append(RichProgressBar())
    # The best checkpoint first, whose path is saved in the checkpoint to resume from.
    return sorted(chosen, key=lambda each: isinstance(each, ModelCheckpoint) and each.monitor is None)


def build_plugins(nodes: Any) -> list[Any]:
    """Build the trainer's plugins, with AtomicCheckpointIO unless the config names another CheckpointIO."""
    nodes = [] if nodes is None else nodes if isinstance(nodes, list) else [nodes]
    plugins = [
        build(node, f"trainer.plugins[{index}]") if isinstance(node, Mapping) else node
        for index, node in enumerate(nodes)
    ]
    has_own = any(isinstance(plugin, CheckpointIO) for plugin in plugins)
    return plugins if has_own else [*plugins, AtomicCheckpointIO()]


@contextmanager
def finished_loggers() -> Iterator[None]:
    """End the W&B run, so that the next job in this process starts its own."""
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        if "wandb" in sys.modules:
            # W&B marks the run as finished for code 0, as failed for others.
            sys.modules["wandb"].finish(exit_code=exit_code)
