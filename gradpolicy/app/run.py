"""Executes one run: orders its parts, plans, fits, tests, reports."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig
from rich.console import Console

from gradpolicy.app.build import Subject, build_callbacks, build_subject, build_trainer
from gradpolicy.app.config import Settings, check_config
from gradpolicy.app.messages import explain
from gradpolicy.app.processes import (
    exit_with_ranks,
    in_sweep,
    is_first_rank,
    job_arguments,
    own_command_line,
    program_name,
    termination_exits,
)
from gradpolicy.app.resume import Resumed, kept, resumed_run, run_loggers, stored_runs
from gradpolicy.app.run_directory import RunDirectory
from gradpolicy.errors import nearest
from gradpolicy.files import write_text
from gradpolicy.insight.loggers import LogRun, name_loggers, write_plan
from gradpolicy.insight.report import write_report
from gradpolicy.insight.run_files import REPORT, RESULT, STOPPED, Result
from gradpolicy.insight.run_log import logged_run, print_results, quieter
from gradpolicy.planning.plan import plan, training_loss
from gradpolicy.planning.plan_table import Plan
from gradpolicy.train.lightning.checkpoints import check_resumable, checked_restore, load_weights
from gradpolicy.train.lightning.resume import ExactResume
from gradpolicy.train.lightning.runs import Kind, RunRecord, best_checkpoint, best_scores
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


def run(config: DictConfig, overrides: list[str], directory: RunDirectory) -> Result:
    """Execute the run of a composed config; call it in a job of Hydra.

    Args:
        config: The config, without Hydra's own part.
        overrides: The overrides of the command line, for the record.
        directory: The directory of the run.

    Raises:
        PolicyError: For invalid input.
        SystemExit: With code 143, if the run got SIGTERM.
    """
    path = directory.path
    result = Result(overrides, status="stopped", error=STOPPED, directory=str(path), program=program_name())
    began = time.monotonic()
    with termination_exits(), quieter(), logged_run(first_rank=is_first_rank()) as console:
        try:
            settings = check_config(config)
            result = plan_and_run(settings, result, directory, console)
        except Exception as error:
            result = replace(result, status="failed", error=explain(error))
            raise
        finally:
            result = replace(result, seconds=time.monotonic() - began)
            has_files = directory.started
            # The summary of a sweep names the jobs that failed before they started.
            if is_first_rank() and (has_files or (in_sweep() and result.status != "planned")):
                directory.started = True
                result.save(path / RESULT)
                if has_files and config.extras.report:
                    write_report([path], path / REPORT, console)
        if is_first_rank() and result.status == "completed":
            print_results(result, settings.optimized_metric, path / REPORT, console)
    return result


def plan_and_run(settings: Settings, result: Result, directory: RunDirectory, console: Console) -> Result:
    """Check, plan, train and test.

    Args:
        settings: The config.
        result: The result so far.
        directory: The run directory.
        console: The console.
    """
    container = settings.model_dump(exclude_unset=True)
    name_loggers(dict(settings), result.overrides, sweep_name())
    seed_everything(settings.seed, workers=True, verbose=False)
    resumed = resumed_run(settings, None if settings.plan_only else directory.path)
    checkpoint = None if resumed is None else resumed.checkpoint
    subject = build_subject(container)
    if checkpoint is not None:
        load_weights(checkpoint, subject.model)
    elif not settings.train and not settings.plan_only:
        rank_zero_warn("train=false without ckpt_path: the weights that are tested were never trained")
    if resumed is not None and settings.train:
        check_resumable(resumed.checkpoint)
        console.print(str(resumed), markup=False, soft_wrap=True)
    reporter = LogRun(container, None, optimized_metrics(settings))
    loggers = run_loggers(settings, resumed)
    callbacks = [
        ExactResume(directory.path),
        *build_callbacks(settings.callbacks, settings.trainer),
        subject.policies,
        RunBegins(directory, record_of(settings, directory, resumed), loggers),
        reporter,
    ]
    check_weight_averaging(callbacks, subject.policies.policies)
    with own_command_line(checkpoint), finished_loggers():
        trainer = build_trainer(settings.trainer, callbacks, loggers.values())
        if is_first_rank() and (settings.plan_only or settings.extras.plan):
            reporter.plan = make_run_plan(subject, settings.seed)
            subject.policies.run.idle = reporter.plan.idle
            subject.policies.run.notices.do_not_repeat(reporter.plan)
            console.print(reporter.plan)
        if settings.plan_only:
            return replace(result, status="planned", error="")
        if is_first_rank():
            write_text(directory.path / "config.yaml", yaml.safe_dump(container, sort_keys=False))
            if reporter.plan is not None:
                write_plan(reporter.plan, directory.path)
        metrics = train_and_test(settings, subject, trainer, checkpoint)
    value = optimized_value(settings, metrics)
    return replace(result, status="completed", error="", metrics=metrics, optimized=value)


def make_run_plan(subject: Subject, seed: int) -> Plan:
    """Return the plan, by one step on a copy of the model with the first batch."""
    subject.data.prepare_data()
    subject.data.setup("fit")
    batch = next(iter(subject.data.train_dataloader()))
    policies = subject.policies.policies
    return plan(subject.model, policies, lambda model: training_loss(model, batch), seed=seed)


def train_and_test(
    settings: Settings, subject: Subject, trainer: Trainer, checkpoint: Path | None
) -> dict[str, float]:
    """Train, test the best weights, and return the last value of each metric."""
    metrics: dict[str, float] = {}
    best: dict[str, float] = {}
    if settings.train:
        with checked_restore(trainer, checkpoint):
            trainer.fit(subject.model, subject.data, ckpt_path=checkpoint, weights_only=True)
        best = best_scores(trainer)
        metrics = _numbers(trainer.callback_metrics) | best
        checkpoint = best_checkpoint(trainer)
    if settings.test:
        with checked_restore(trainer, checkpoint):
            trainer.test(subject.model, subject.data, ckpt_path=checkpoint, weights_only=True, verbose=False)
        metrics |= _numbers(trainer.callback_metrics)
    for logger in trainer.loggers:
        logger.log_metrics(best, step=trainer.global_step)
        logger.save()
    return metrics


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def record_of(settings: Settings, directory: RunDirectory, resumed: Resumed | None) -> RunRecord:
    """Return the record of a new or continued run."""
    former = RunRecord.load(directory.path) if resumed is not None and resumed.directory is not None else None
    kind: Kind = "sweep" if sweep_name() or "WANDB_SWEEP_ID" in os.environ else "run"
    command = job_arguments(HydraConfig.get())
    record = RunRecord.begin(directory.path, settings.task_name, former.kind if former else kind, command)
    return replace(record, kept=kept(settings), checkpoints=former.checkpoints if former else [])


def optimized_metrics(settings: Settings) -> list[str]:
    """Return the metric by which runs are compared, and the metric of which it is the best value."""
    name = settings.optimized_metric
    return [] if name is None else list(dict.fromkeys((name, name.removesuffix("_best"))))


def sweep_name() -> str | None:
    """Return the name of the sweep or study whose directory this run is in; None if there is none."""
    sweep, directory = Path(HydraConfig.get().sweep.dir), Path(HydraConfig.get().runtime.output_dir)
    return sweep.name if in_sweep() or directory.parent == sweep else None


def optimized_value(settings: Settings, metrics: Mapping[str, float]) -> float | None:
    """Return the value of the optimized metric; None, with a warning, if it was not logged.

    A run without checkpoints (``trainer.fast_dev_run``, most of ``debug=``) has no best value to log.
    """
    name = settings.optimized_metric
    if name is None or not settings.train:
        return None
    quiet = name.endswith("_best") and name.removesuffix("_best") in metrics
    if name not in metrics and not quiet:
        rank_zero_warn(f"optimized_metric: {name!r} was not logged; {nearest(name, metrics)}")
    return metrics.get(name)


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
