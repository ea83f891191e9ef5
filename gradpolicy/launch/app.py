"""The program: reads the command line, checks every job, and lets Hydra run them."""

import argparse
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
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
from gradpolicy.errors import PolicyError, brief, nearest
from gradpolicy.imports import allowed_packages, limited_to
from gradpolicy.insight.report import write_report
from gradpolicy.insight.run_files import REPORT, STOPPED, Result
from gradpolicy.insight.run_log import quieter, replace_unencodable
from gradpolicy.insight.sweep_summary import RESULTS, SUMMARY, SweepSummary, collect
from gradpolicy.launch.allowed_targets import check_not_from_config, trusted_packages
from gradpolicy.launch.compose import (
    VERSION_BASE,
    Source,
    check_job,
    compose_job,
    fixed_overrides,
    hydra_at,
    jobs_of,
)
from gradpolicy.launch.config import Settings
from gradpolicy.launch.hydra_settings import check_given_search_path, check_hydra, check_launcher
from gradpolicy.launch.messages import (
    FAILED,
    INTERRUPTED,
    LINE,
    TERMINATED,
    WRONG_INPUT,
    explain,
    full_disk,
    report_error,
    wrong_input_errors,
)
from gradpolicy.launch.processes import is_first_rank, quoted, termination_exits, under_srun
from gradpolicy.launch.run_directory import RunDirectory, claimed_directory, is_fixed, is_unused

CONFIG_NAME = "train"


def main(config_dir: Path, arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        config_dir: The directory of configs.
        arguments: The command line; that of this process unless given.

    Returns:
        The exit code: 0, 1 for a failure, 2 for wrong input, 3 for a promise that did not hold, 130 for
        Ctrl-C, 143 for SIGTERM.
    """
    replace_unencodable()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = read_command_line(arguments)
    except PolicyError as error:
        report_error(error, show_traceback=False)
        return WRONG_INPUT
    flags = [word for word in arguments if word not in options.overrides]
    show_traceback = "extras.traceback=true" in options.overrides
    try:
        source = Source(
            Path(options.config_path or config_dir).absolute(),
            options.config_name or CONFIG_NAME,
            Path(options.config_dir).absolute() if options.config_dir else None,
        )
        if options.experimental_rerun:
            raise PolicyError("--experimental-rerun: is not supported: it would run what a pickle holds")
        trusted = trusted_packages(options.overrides, config_dir.parent)
        with limited_to(trusted), hydra_at(source) as prepared:
            if not _asks_for_information(options):
                config = compose_job(source, fixed_overrides(options.overrides))
                show_traceback = OmegaConf.select(config, "extras.traceback") is True
                return start(prepared, source, options, config)
            check_given_search_path(options.overrides)
            if options.cfg:
                compose_job(source, options.overrides)
            if options.help:
                _print_help(prepared, source, options)
                return 0
        _ask_hydra(config_dir, [*flags, *options.overrides])
        return 0
    except KeyboardInterrupt:
        return _interrupted(options)
    except SystemExit as leaving:
        # Lightning raises SystemExit where Ctrl-C interrupts training.
        if isinstance(leaving.__context__, KeyboardInterrupt):
            return _interrupted(options)
        if leaving.code == TERMINATED and is_first_rank():
            print(f"ended by SIGTERM; {_how_to_resume(options, 'last')}", file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else FAILED
    except wrong_input_errors() as error:
        if is_first_rank():
            report_error(error, show_traceback)
        return getattr(error, "exit_code", WRONG_INPUT)
    except Exception as error:
        if full_disk(error) is None:
            raise
        report_error(error, show_traceback)
        return FAILED


def read_command_line(arguments: Sequence[str]) -> Namespace:
    """Read Hydra's own flags; all other words are overrides.

    Raises:
        PolicyError: As :func:`parse_command_line`.
    """
    return parse_command_line(get_args_parser(), arguments)


def parse_command_line(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Parse a command line, and raise one clear error where the parser would exit.

    Raises:
        PolicyError: For a flag that does not exist, or a value that one does not take.
    """
    # Otherwise the program ends here, and says how it is used before it says what is wrong.
    parser.exit_on_error = False
    flags = [flag for action in parser._actions for flag in action.option_strings]
    try:
        options, unknown = parser.parse_known_intermixed_args(arguments)
    except argparse.ArgumentError as error:
        raise PolicyError(f"{error.argument_name}: {brief(str(error.message), most=LINE)}") from error
    if unknown:
        word = unknown[0].partition("=")[0]
        raise PolicyError(f"{brief(word)}: there is no such flag; {nearest(word, flags)}")
    return options


def start(prepared: Hydra, source: Source, options: Namespace, config: DictConfig) -> int:
    """Check every job that the command line asks for, then run the job, or the sweep.

    Args:
        prepared: Hydra, set up.
        source: Where configs come from.
        options: The command line.
        config: The composed config, without overrides that sweep.

    Raises:
        PolicyError: For wrong input.
    """
    overrides = options.overrides
    if not options.multirun and config.hydra.mode != RunMode.MULTIRUN:
        if fixed_overrides(overrides) != overrides:
            raise PolicyError("several values for one key make a sweep: add -m, or quote the value")
        run_job(prepared, config, check_job(config, overrides))
        return 0
    check_hydra(config, overrides)
    check_not_from_config(config, overrides)
    check_launcher(config)
    for job in jobs_of(config, overrides):
        check_job(compose_job(source, job), overrides)
    run_sweep(prepared, source, config, overrides)
    return 0


def run_job(prepared: Hydra, config: DictConfig, settings: Settings) -> None:
    """Let Hydra run one job: Hydra makes the directory, sets up logging, and calls the job."""
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.mode = RunMode.RUN
        if not is_first_rank():
            config.hydra.output_subdir = None
    callbacks = Callbacks(config)
    callbacks.on_run_start(config=config, config_name=config.hydra.job.config_name)
    job = Job(in_sweep=False)
    if not config.hydra.run.dir:
        raise PolicyError("hydra.run.dir: names no directory")
    if settings.train and not settings.plan_only:
        choose_directory(config, settings)
    with claimed_directory(config.hydra.run, "hydra.run.dir") as directory:
        with read_write(config.hydra):
            config.hydra.run.dir = str(directory)
        try:
            returned = hydra_utils.run_job(
                hydra_context=HydraContext(config_loader=prepared.config_loader, callbacks=callbacks),
                task_function=job,
                config=config,
                job_dir_key="hydra.run.dir",
                job_subdir_key=None,
            )
        except Exception as error:
            # The job catches its own errors, so Hydra raised this one while it set the job up.
            RunDirectory(directory).clear_unless_begun()
            if isinstance(error, wrong_input_errors()):
                raise
            raise _cannot_set_up(error) from error
        if returned.status is hydra_utils.JobStatus.FAILED and job.error is None:
            # Hydra resolves the values of the job once more before it calls it.
            RunDirectory(directory).clear_unless_begun()
            raise _cannot_set_up(returned._return_value)
    callbacks.on_run_end(config=config, config_name=config.hydra.job.config_name, job_return=returned)
    if job.error is not None:
        raise job.error


def choose_directory(config: DictConfig, settings: Settings) -> None:
    """Have a resumed job run in the directory of the run that it goes on with.

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
            # Hydra's own files stay those of the command that began the run.
            config.hydra.output_subdir = None


def _cannot_set_up(error: BaseException) -> PolicyError:
    return PolicyError(
        f"hydra: the job cannot be set up: {type(error).__name__}: {brief(str(error), most=LINE)}"
    )


def run_sweep(prepared: Hydra, source: Source, config: DictConfig, overrides: list[str]) -> None:
    """Let Hydra's sweeper and launcher run the jobs; print the summary even if some failed."""
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
        in_sweep: Whether it is one of several. Then the error of a failed job is raised to Hydra, which goes
            on with the others.
    """

    def __init__(self, *, in_sweep: bool) -> None:
        self.in_sweep = in_sweep
        # A launcher may run the job in a process that does not have this command line.
        self.trusted = allowed_packages()
        self.error: Exception | None = None

    def __call__(self, config: DictConfig) -> float | None:
        """Run a job; in a sweep, save its result for the summary."""
        from gradpolicy.launch.run import run

        hydra_config = HydraConfig.get()
        overrides = list(hydra_config.overrides.task)
        directory = Path(hydra_config.runtime.output_dir)
        result = Result(overrides, status="stopped", error=STOPPED, directory=str(directory))
        try:
            with limited_to(self.trusted):
                result = run(config, overrides)
        except Exception as error:
            result = replace(result, status="failed", error=explain(error))
            if self.in_sweep:
                raise
            self.error = error
        finally:
            if self.in_sweep and is_first_rank():
                result.save(Path(hydra_config.sweep.dir) / RESULTS / f"{hydra_config.job.num}.json")
                # A job that never began has left its directory empty.
                with suppress(OSError):
                    directory.rmdir()
        return result.optimized


def _interrupted(options: Namespace) -> int:
    if is_first_rank():
        print(f"interrupted; {_how_to_resume(options, 'newest')}", file=sys.stderr)
    return INTERRUPTED


def _how_to_resume(options: Namespace, which: str) -> str:
    if options.multirun:
        return "ckpt_path=DIRECTORY goes on with a job of the sweep, in whose directory its checkpoints lie"
    return f"ckpt_path=last goes on from the {which} checkpoint"


def _asks_for_information(options: Namespace) -> bool:
    """Return True if the command line asks Hydra for information, not for a run."""
    asked = ("help", "hydra_help", "version", "info", "cfg", "shell_completion")
    return any(getattr(options, name, None) for name in asked)


def _print_help(prepared: Hydra, source: Source, options: Namespace) -> None:
    """Print the help with the groups of the whole search path.

    Hydra itself leaves out those of ``hydra.searchpath``, in the config at the top and on the command line.
    """
    overrides = [line for line in options.overrides if line.startswith("hydra.searchpath=")]
    loader = prepared.config_loader
    every = partial(loader.get_group_options, config_name=source.name, overrides=overrides)
    loader.get_group_options = every  # type: ignore[method-assign]
    prepared.app_help(source.name, get_args_parser(), options)


def _ask_hydra(config_dir: Path, arguments: list[str]) -> None:
    """Let Hydra print what the command line asks for."""
    former = sys.argv
    sys.argv = [former[0], *arguments]
    try:
        hydra.main(version_base=VERSION_BASE, config_path=str(config_dir), config_name=CONFIG_NAME)(
            _nothing
        )()
    finally:
        sys.argv = former


def _nothing(config: DictConfig) -> None:
    """Take the place of the job if the command line asks for none."""


def _end_sweep(directory: Path, config: DictConfig, is_new: bool) -> None:
    """Print the summary; a sweep in which no job began leaves nothing."""
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
