"""The program: parses the command line, checks every job, and runs them by Hydra."""

import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import hydra
import hydra.core.utils as hydra_utils
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gradpolicy.display import wide_console
from gradpolicy.errors import PolicyError
from gradpolicy.insight.report import write_report
from gradpolicy.insight.run_files import REPORT, STOPPED, Result
from gradpolicy.insight.run_log import quieter, replace_unencodable
from gradpolicy.insight.sweep_summary import RESULTS, SUMMARY, SweepSummary, collect
from gradpolicy.launch.config import (
    VERSION_BASE,
    Settings,
    Source,
    check_job,
    compose_job,
    fixed_overrides,
    hydra_at,
    jobs_of,
)
from gradpolicy.launch.messages import (
    FAILED,
    INTERRUPTED,
    TERMINATED,
    WRONG_INPUT,
    explain,
    report_error,
    wrong_input_errors,
)
from gradpolicy.launch.processes import is_first_rank, quoted, reports_errors, termination_exits, under_srun
from gradpolicy.launch.run_directory import KEY, claimed_directory, is_fixed, is_unused

CONFIG_NAME = "train"


def main(config_dir: Path, arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        config_dir: The directory of configs.
        arguments: The command line; default: that of this process.

    Returns:
        The exit code: 0, 1 for a failure, 2 for invalid input, 3 for a violated guarantee, 130 for Ctrl-C,
        143 for SIGTERM.
    """
    replace_unencodable()
    words = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = False
    try:
        options = get_args_parser().parse_intermixed_args(words)
        source = Source(
            Path(options.config_path or config_dir).absolute(),
            options.config_name or CONFIG_NAME,
            Path(options.config_dir).absolute() if options.config_dir else None,
        )
        # Modules beside the configs, and those of the current directory, may be named in a config.
        given = [Path(each).absolute().parent for each in (options.config_path, options.config_dir) if each]
        sys.path += [str(place) for place in (*given, Path.cwd()) if str(place) not in sys.path]
        if _asks_for_information(options):
            # Flags first, since Hydra's own parser takes no others.
            _ask_hydra(config_dir, sorted(words, key=options.overrides.__contains__))
            return 0
        with hydra_at(source) as prepared:
            config = compose_job(source, fixed_overrides(options.overrides))
            show_traceback = OmegaConf.select(config, "extras.traceback") is True
            return start(prepared, source, options, config)
    except (KeyboardInterrupt, SystemExit) as leaving:
        # Lightning raises SystemExit if Ctrl-C interrupts training.
        interrupts = any(isinstance(each, KeyboardInterrupt) for each in (leaving, leaving.__context__))
        code = INTERRUPTED if interrupts else getattr(leaving, "code", FAILED)
        if code in (INTERRUPTED, TERMINATED) and is_first_rank():
            print(
                "interrupted" if interrupts else "ended by SIGTERM",
                _how_to_resume(words),
                sep="; ",
                file=sys.stderr,
            )
        return code if isinstance(code, int) else FAILED
    except wrong_input_errors() as error:
        if show_traceback or reports_errors():
            report_error(error, show_traceback)
        return getattr(error, "exit_code", WRONG_INPUT)


def start(prepared: Hydra, source: Source, options: Namespace, config: DictConfig) -> int:
    """Check every job of the command line, then run the job or the sweep.

    Args:
        prepared: Hydra.
        source: The directories of configs.
        options: The command line.
        config: The composed config, without sweep overrides.

    Raises:
        PolicyError: For invalid input.
    """
    overrides = options.overrides
    if not options.multirun and config.hydra.mode != RunMode.MULTIRUN:
        if fixed_overrides(overrides) != overrides:
            raise PolicyError("several values for one key make a sweep: add -m, or quote the value")
        run_job(prepared, config, check_job(config))
        return 0
    for job in jobs_of(config, overrides):
        check_job(compose_job(source, job))
    run_sweep(prepared, source, config, overrides)
    return 0


def run_job(prepared: Hydra, config: DictConfig, settings: Settings) -> None:
    """Run one job by Hydra, which creates the directory, sets up logging, and calls the job."""
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.mode = RunMode.RUN
        if not is_first_rank():
            config.hydra.output_subdir = None
    callbacks = Callbacks(config)
    callbacks.on_run_start(config=config, config_name=config.hydra.job.config_name)
    if settings.train and not settings.plan_only:
        choose_directory(config, settings)
    with claimed_directory(config.hydra.run, KEY) as directory:
        with read_write(config.hydra):
            config.hydra.run.dir = str(directory)
        returned = hydra_utils.run_job(
            hydra_context=HydraContext(config_loader=prepared.config_loader, callbacks=callbacks),
            task_function=Job(in_sweep=False),
            config=config,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
        )
    callbacks.on_run_end(config=config, config_name=config.hydra.job.config_name, job_return=returned)
    if returned.status is hydra_utils.JobStatus.FAILED:
        # Not its return_value, which also prints.
        raise returned._return_value


def choose_directory(config: DictConfig, settings: Settings) -> None:
    """Set the directory of a resumed job to that of the run that it continues.

    Raises:
        PolicyError: If there is no such checkpoint, or it contradicts the config.
    """
    is_chosen = under_srun() or is_fixed(config.hydra.run)
    own = Path(config.hydra.run.dir).absolute() if is_chosen else None
    if settings.ckpt_path is None and own is None:
        return
    from gradpolicy.launch.resumed import chosen_checkpoint, resumed_run

    with quieter():
        checkpoint = chosen_checkpoint(settings, own)
        if checkpoint is None:
            return
        resumed = resumed_run(settings, checkpoint, own)
    with read_write(config), open_dict(config), read_write(config.hydra):
        config.ckpt_path = str(checkpoint.absolute())
        if resumed.directory is not None:
            config.hydra.run.dir = str(resumed.directory.absolute())
            # Hydra's own files remain those of the original command.
            config.hydra.output_subdir = None


def run_sweep(prepared: Hydra, source: Source, config: DictConfig, overrides: list[str]) -> None:
    """Run the jobs by Hydra's sweeper and launcher; print the summary even if some failed."""
    with claimed_directory(config.hydra.sweep, "hydra.sweep.dir") as directory, termination_exits():
        is_new = is_unused(directory)
        try:
            prepared.multirun(
                config_name=source.name,
                task_function=Job(in_sweep=True),
                overrides=[*overrides, f"hydra.sweep.dir={quoted(str(directory))}"],
            )
        finally:
            if is_first_rank():
                _end_sweep(directory, config, is_new)


class Job:
    """The function that Hydra calls for each job.

    Args:
        in_sweep: True if it is one of several jobs, whose results are saved for the summary.
    """

    def __init__(self, *, in_sweep: bool) -> None:
        self.in_sweep = in_sweep

    def __call__(self, config: DictConfig) -> float | None:
        """Run a job."""
        from gradpolicy.launch.run import run

        hydra_config = HydraConfig.get()
        # It resolves references of the command line, so a dangling reference fails before the job starts.
        overrides = list(hydra_config.overrides.task)
        directory = Path(hydra_config.runtime.output_dir)
        result = Result(overrides, status="stopped", error=STOPPED, directory=str(directory))
        try:
            result = run(config, overrides)
        except Exception as error:
            result = replace(result, status="failed", error=explain(error))
            raise
        finally:
            if self.in_sweep and is_first_rank():
                result.save(Path(hydra_config.sweep.dir) / RESULTS / f"{hydra_config.job.num}.json")
                # A job that did not start has left its directory empty.
                with suppress(OSError):
                    directory.rmdir()
        return result.optimized


def _how_to_resume(words: Sequence[str]) -> str:
    if {"-m", "--multirun"} & set(words):
        return "ckpt_path=DIRECTORY goes on with a job of the sweep, in whose directory its checkpoints lie"
    return "ckpt_path=last goes on from the last checkpoint"


def _asks_for_information(options: Namespace) -> bool:
    """Return True if the command line asks Hydra for information, not for a run."""
    asked = ("help", "hydra_help", "version", "info", "cfg", "shell_completion")
    return any(getattr(options, name, None) for name in asked)


def _ask_hydra(config_dir: Path, words: list[str]) -> None:
    """Print the information that the command line requests, by Hydra."""
    former = sys.argv
    sys.argv = [former[0], *words]
    try:
        program = hydra.main(version_base=VERSION_BASE, config_path=str(config_dir), config_name=CONFIG_NAME)
        program(lambda config: None)()
    finally:
        sys.argv = former


def _end_sweep(directory: Path, config: DictConfig, is_new: bool) -> None:
    """Print the summary; remove the directory of a sweep in which no job started."""
    results = collect(directory)
    if any(result.status != "failed" or Path(result.directory).is_dir() for result in results):
        metric, mode = config.get("optimized_metric"), config.get("optimized_mode") or "max"
        summary, console = SweepSummary(results, metric, mode), wide_console()
        summary.show(console)
        summary.write(directory / SUMMARY, console)
        if summary.runs and OmegaConf.select(config, "extras.report"):
            write_report(summary.runs, directory / REPORT, console, names_it=True)
    elif is_new:
        shutil.rmtree(directory, ignore_errors=True)
