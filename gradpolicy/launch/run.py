"""Executes one run: builds its parts, plans, fits, tests, reports."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from gradpolicy.errors import PolicyError, brief, nearest, shown
from gradpolicy.imports import to_install
from gradpolicy.insight.loggers import LogRun, name_loggers, write_plan
from gradpolicy.insight.report import write_report
from gradpolicy.insight.run_files import REPORT, RESULT, STOPPED, Result
from gradpolicy.insight.run_log import logged_run, print_config, print_results, quieter
from gradpolicy.launch.config import (
    Settings,
    check_config,
    default_config,
    resolved,
)
from gradpolicy.launch.messages import LINE, explain, full_disk
from gradpolicy.launch.processes import (
    is_first_rank,
    job_arguments,
    own_command_line,
    program_name,
    termination_exits,
)
from gradpolicy.launch.resumed import Resumed, chosen_checkpoint, resumed_run
from gradpolicy.launch.run_directory import (
    RunDirectory,
    check_writable,
    locked,
    run_directory,
)
from gradpolicy.launch.targets import build, build_all
from gradpolicy.launch.trainer import build_trainer, finished_loggers
from gradpolicy.lightning.callback import GradientPolicies
from gradpolicy.lightning.checkpoints import check_fits, check_resumable
from gradpolicy.lightning.resume import checked_restore
from gradpolicy.lightning.runs import Kind, RunRecord, best_checkpoint, best_scores
from gradpolicy.planning.plan import plan, training_loss
from gradpolicy.planning.plan_table import Plan
from gradpolicy.policies import Policy
from gradpolicy.tasks.task import Task
from gradpolicy.whole_file import write_text

CONFIG, DEFAULTS = "config.yaml", "defaults.yaml"


@dataclass
class Subject:
    """The data, the model, and the policies that act on it."""

    data: LightningDataModule
    model: LightningModule
    policies: dict[str, Policy]


def build_subject(container: Mapping[str, Any]) -> Subject:
    """Build the data module, the model and the policies of a resolved config.

    Raises:
        PolicyError: If one cannot be built, or has the wrong type.
    """
    return Subject(
        build(container["data"], "data", LightningDataModule),
        build(container["model"], "model", LightningModule),
        build_all(container.get("policy"), "policy", Policy),
    )


def run(config: DictConfig, overrides: list[str]) -> Result:
    """Execute the run of a composed config.

    Args:
        config: The config, without Hydra's own part.
        overrides: The overrides of the command line, for the record.

    Raises:
        PolicyError: For invalid input.
        SystemExit: With code 143, if the run got SIGTERM.
    """
    settings = check_config(config)
    name_loggers(dict(settings), overrides, sweep_name(settings))
    container = settings.model_dump(exclude_unset=True)
    if not settings.plan_only:
        prepare_wandb(container)
    with (
        termination_exits(),
        quieter(),
        run_directory(Path(settings.paths.output_dir)) as directory,
        ExitStack() as locks,
    ):
        for key, place in places_of(container).items():
            check_writable(place, key)
            if key.endswith(".dirpath"):
                locks.enter_context(locked(place, key))
        with logged_run(first_rank=is_first_rank()) as console:
            return plan_and_run(settings, container, overrides, directory, console)


def places_of(container: Mapping[str, Any]) -> dict[str, Path]:
    """Return the local directories to which callbacks and loggers of a config write, by key."""
    named = {
        f"{group}.{name}.{argument}": (node or {}).get(argument)
        for group, argument in (("callbacks", "dirpath"), ("logger", "save_dir"))
        for name, node in (container.get(group) or {}).items()
    }
    local = {key: each for key, each in named.items() if isinstance(each, str) and "://" not in each}
    return {key: Path(each).expanduser() for key, each in local.items()}


def plan_and_run(
    settings: Settings,
    container: dict[str, Any],
    overrides: list[str],
    directory: RunDirectory,
    console: Console,
) -> Result:
    """Check, plan, train, test and report.

    Args:
        settings: The config.
        container: The config as plain containers.
        overrides: The overrides of the command line.
        directory: The run directory.
        console: The console.
    """
    check_accelerator(settings.trainer.get("accelerator"))
    seed_everything(settings.seed, workers=True, verbose=False)
    checkpoint, resumed = checked_checkpoint(settings, directory)
    subject = build_subject(container)
    if checkpoint is not None:
        check_fits(checkpoint, subject.model)
    elif not settings.train and not settings.plan_only:
        rank_zero_warn("train=false without ckpt_path: the weights that are tested were never trained")
    if settings.train:
        check_optimizer(subject.model)
    if resumed is not None:
        check_resumable(resumed.checkpoint)
        console.print(str(resumed), markup=False, soft_wrap=True)
    reporter = LogRun(container, None, optimized_metrics(settings))
    policies = GradientPolicies(subject.policies, seed=settings.seed)
    record = record_of(settings, directory, resumed)
    result = Result(overrides, directory=str(directory.path), program=program_name())
    began = time.monotonic()
    try:
        with own_command_line(checkpoint), finished_loggers():
            trainer = build_trainer(settings, policies, directory, record, reporter, resumed=resumed)
            if is_first_rank():
                if settings.plan_only or settings.extras.plan:
                    reporter.plan = make_run_plan(subject, settings.seed)
                    policies.shown_warnings = frozenset(reporter.plan.warnings)
                    console.print(reporter.plan)
                    policies.layers = False  # the plan has them
                if settings.extras.print_config:
                    print_config(container, console)
            if settings.plan_only:
                directory.clear_unless_begun()
                return Result(overrides, status="planned")
            if is_first_rank():
                save_settings(container, reporter.plan, directory.path)
            metrics = train_and_test(settings, subject, trainer, checkpoint)
        result = replace(result, metrics=metrics, optimized=optimized_value(settings, metrics))
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        failure = explain(error) if isinstance(error, Exception) else STOPPED
        status = "failed" if isinstance(error, Exception) else "stopped"
        result = replace(result, status=status, error=failure)
        # Invalid input that is found before the first step leaves no files.
        if directory.begun:
            save_result(replace(result, seconds=time.monotonic() - began), settings, console)
        raise
    result = replace(result, seconds=time.monotonic() - began)
    save_result(result, settings, console)
    if is_first_rank():
        print_results(result, settings.optimized_metric, directory.path / REPORT, console)
    return result


def check_accelerator(name: object) -> None:
    """Check, before data and model are built, that this machine has the accelerator of the trainer.

    Raises:
        PolicyError: If it does not.
    """
    there = any(kind.is_available() for kind in (CUDAAccelerator, MPSAccelerator))
    if name in ("cuda", "gpu", "mps") and not there:
        raise PolicyError(
            f"trainer.accelerator: {shown(name)} given, and torch finds none on this machine; trainer=cpu or "
            "trainer.accelerator=auto needs none (torch.cuda.is_available() is false with a build of torch "
            "for CPUs alone, too)"
        )


def checked_checkpoint(settings: Settings, directory: RunDirectory) -> tuple[Path | None, Resumed | None]:
    """Return the checkpoint that is resumed or tested, and, for training, the run that it continues.

    Raises:
        PolicyError: If there is none, or it contradicts the config.
    """
    own = None if settings.plan_only else directory.path
    checkpoint = chosen_checkpoint(settings, own, in_sweep=_in_sweep())
    if checkpoint is None or not settings.train:
        return checkpoint, None
    return checkpoint, resumed_run(settings, checkpoint, own)


def check_optimizer(model: LightningModule) -> None:
    """Create the optimizer of a task once, to check its arguments before training.

    Raises:
        PolicyError: For invalid arguments of the optimizer.
    """
    if isinstance(model, Task):
        try:
            model.build_optimizer()
        except (TypeError, ValueError) as error:
            raise PolicyError(f"optimizer: {error}") from error


def save_result(result: Result, settings: Settings, console: Console) -> None:
    """Write a run's result and report."""
    if is_first_rank():
        directory = Path(result.directory)
        result.save(directory / RESULT)
        if settings.extras.report:
            write_report([directory], directory / REPORT, console)


def prepare_data(subject: Subject, stage: str = "fit") -> None:
    """Download and set up the data, for training or for another stage.

    Raises:
        PolicyError: If the network, a file or a package is missing.
    """
    try:
        subject.data.prepare_data()
        subject.data.setup(stage)
    except (OSError, ModuleNotFoundError) as error:
        if full_disk(error) is not None:
            raise
        name = type(subject.data).__name__
        if isinstance(error, ModuleNotFoundError):
            raise PolicyError(f"data: {name} {to_install(error)}") from error
        reason = f"{type(error).__name__}: {brief(str(error), most=LINE)}"
        raise PolicyError(
            f"data: {name} cannot get its data: {reason}; without a network, put the files where it looks"
        ) from error


def make_run_plan(subject: Subject, seed: int) -> Plan:
    """Return the plan, by one step on a copy of the model with the first batch."""
    prepare_data(subject)
    batch = next(iter(subject.data.train_dataloader()))
    return plan(subject.model, subject.policies, lambda model: training_loss(model, batch), seed=seed)


def train_and_test(
    settings: Settings, subject: Subject, trainer: Trainer, checkpoint: Path | None
) -> dict[str, float]:
    """Train, test the best weights, and return the last value of each metric."""
    metrics: dict[str, float] = {}
    best: dict[str, float] = {}
    if is_first_rank():
        prepare_data(subject, "fit" if settings.train else "test")
    if settings.train:
        with monitor_errors_named(settings, trainer), checked_restore(checkpoint):
            trainer.fit(subject.model, subject.data, ckpt_path=checkpoint, weights_only=True)
        best = best_scores(trainer)
        metrics = _numbers(trainer.callback_metrics) | best
        checkpoint = best_checkpoint(trainer)
    if settings.test:
        with checked_restore(checkpoint):
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
    kind: Kind = "sweep" if _in_sweep() or "WANDB_SWEEP_ID" in os.environ else "run"
    kind = "trial" if "study" in (settings.callbacks or {}) else kind
    command = job_arguments(HydraConfig.get()) if HydraConfig.initialized() else []
    record = RunRecord.begin(directory.path, settings.task_name, former.kind if former else kind, command)
    return replace(record, checkpoints=former.checkpoints) if former else record


def save_settings(container: Mapping[str, Any], planned: Plan | None, directory: Path) -> None:
    """Write the plan, the config, and the config without overrides to the run directory.

    The latter is for the differences in the report.
    """
    directory.mkdir(parents=True, exist_ok=True)
    defaults = default_config()
    configs = {CONFIG: dict(container), DEFAULTS: resolved(defaults) if defaults is not None else None}
    for name, config in configs.items():
        if config is not None:
            write_text(directory / name, yaml.safe_dump(config, sort_keys=False))
    if planned is not None:
        write_plan(planned, directory)


def optimized_metrics(settings: Settings) -> list[str]:
    """Return the metric by which runs are compared, and the metric of which it is the best value."""
    name = settings.optimized_metric
    return [] if name is None else list(dict.fromkeys((name, name.removesuffix("_best"))))


def sweep_name(settings: Settings) -> str | None:
    """Return the name of the run's sweep or study."""
    study = ((settings.callbacks or {}).get("study") or {}).get("study")
    return Path(HydraConfig.get().sweep.dir).name if _in_sweep() else study


def prepare_wandb(container: Mapping[str, Any]) -> None:
    """Set up W&B, if the run logs to it, before its first warning."""
    loggers = (container.get("logger") or {}).values()
    if any(str((node or {}).get("_target_")).endswith(".WandbLogger") for node in loggers):
        import wandb

        wandb.setup()


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


def _in_sweep() -> bool:
    # Hydra numbers the jobs of a sweep. Their mode is that of a single run, unless a config sets it.
    return HydraConfig.initialized() and not OmegaConf.is_missing(HydraConfig.get().job, "num")


@contextmanager
def monitor_errors_named(settings: Settings, trainer: Trainer) -> Iterator[None]:
    """Turn a callback's error about a metric that is not logged into one with its key and the logged metrics.

    Raises:
        PolicyError: In place of the callback's error.
    """
    try:
        yield
    except (RuntimeError, ValueError, MisconfigurationException) as error:
        if "`val_check_interval`" in str(error):
            raise PolicyError(f"trainer.val_check_interval: {' '.join(str(error).split())}") from error
        logged = trainer.callback_metrics
        for name, node in (settings.callbacks or {}).items():
            monitor = (node or {}).get("monitor")
            if monitor and str(monitor) in str(error) and monitor not in logged:
                message = f"callbacks.{name}.monitor: {monitor!r} is not logged; {nearest(monitor, logged)}"
                raise PolicyError(message) from error
        raise
