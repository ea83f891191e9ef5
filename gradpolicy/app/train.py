"""The program: parses the command line, checks every job, and runs them by Hydra."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gradpolicy.app.config import (
    VERSION_BASE,
    Settings,
    Source,
    check_job,
    compose_job,
    fixed_overrides,
    hydra_at,
    hydra_config,
    jobs_of,
)
from gradpolicy.app.messages import (
    FAILED,
    INTERRUPTED,
    TERMINATED,
    WRONG_INPUT,
    explain,
    report_error,
    wrong_input_errors,
)
from gradpolicy.app.processes import is_first_rank, quoted, reports_errors, termination_exits, under_srun
from gradpolicy.app.run_directory import KEY, claimed_directory, is_fixed, is_unused
from gradpolicy.display import wide_console
from gradpolicy.errors import PolicyError
from gradpolicy.insight.report import write_report
from gradpolicy.insight.run_files import REPORT, STOPPED, Result
from gradpolicy.insight.run_log import quieter, replace_unencodable
from gradpolicy.insight.sweep_summary import RESULTS, SUMMARY, SweepSummary, collect

# Options of Hydra that print something instead of running a job.
INFORMATION = ("help", "hydra_help", "version", "cfg", "info", "shell_completion")


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
        options = parse(words)
        source = Source(
            Path(options.config_path or config_dir).absolute(),
            options.config_name or "train",
            Path(options.config_dir).absolute() if options.config_dir else None,
        )
        # Modules beside the configs, and those of the current directory, may be named in a config.
        given = [Path(each).absolute().parent for each in (options.config_path, options.config_dir) if each]
        sys.path += [str(place) for place in (*given, Path.cwd()) if str(place) not in sys.path]
        if any(getattr(options, name) for name in INFORMATION):
            run_by_hydra(Job(in_sweep=False), source, options)
            return 0
        with hydra_at(source):
            config = compose_job(source, fixed_overrides(options.overrides))
            show_traceback = OmegaConf.select(config, "extras.traceback") is True
            settings = check_jobs(source, options, config)
        with hydra_config(config):
            if settings is None:
                run_sweep(source, options, config)
            else:
                run_job(source, options, config, settings)
        return 0
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


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line: Hydra's options and overrides, in any order."""
    parser = argparse.ArgumentParser(prog="gradpolicy", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for flags in (("--help", "-h"), ("--run", "-r"), ("--multirun", "-m"), ("--shell-completion", "-sc")):
        parser.add_argument(*flags, action="store_true")
    for flag in ("--hydra-help", "--version", "--resolve"):
        parser.add_argument(flag, action="store_true")
    for flags in (("--config-path", "-cp"), ("--config-name", "-cn"), ("--config-dir", "-cd")):
        parser.add_argument(*flags)
    for flags in (("--cfg", "-c"), ("--package", "-p")):
        parser.add_argument(*flags)
    parser.add_argument("--info", "-i", nargs="?", const="all")
    return parser.parse_intermixed_args(words)


def check_jobs(source: Source, options: argparse.Namespace, config: DictConfig) -> Settings | None:
    """Check every job of a command line; call it within :func:`hydra_at`.

    Args:
        source: The directories of configs.
        options: The command line.
        config: The composed config, without sweep overrides.

    Returns:
        The settings of the job; None if the command line is a sweep.

    Raises:
        PolicyError: For invalid input.
    """
    overrides = options.overrides
    if not options.multirun and config.hydra.mode != RunMode.MULTIRUN:
        if fixed_overrides(overrides) != overrides:
            raise PolicyError("several values for one key make a sweep: add -m, or quote the value")
        return check_job(config)
    for job in jobs_of(config, overrides):
        check_job(compose_job(source, job))
    return None


def run_by_hydra(job: "Job", source: Source, options: argparse.Namespace, *overrides: str) -> None:
    """Call `hydra.main`, which creates the directories, sets up logging, and calls the job.

    Args:
        job: The function that Hydra calls.
        source: The directories of configs.
        options: The command line.
        *overrides: Further overrides.
    """
    given = {name: value for name, value in vars(options).items() if value and name != "overrides"}
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in given.items()
        if name not in ("config_path", "config_name")
    ]
    # Hydra then raises errors instead of printing them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    former = sys.argv
    sys.argv = [former[0], *flags, *options.overrides, *overrides]
    try:
        program = hydra.main(str(source.directory), source.name, VERSION_BASE)
        program(job)()
    finally:
        sys.argv = former


def run_job(source: Source, options: argparse.Namespace, config: DictConfig, settings: Settings) -> None:
    """Run one job; one that is resumed runs in the directory of the run that it continues."""
    more = [] if is_first_rank() else ["hydra.output_subdir=null"]
    if settings.train and not settings.plan_only:
        resumed = resumed_overrides(config, settings)
        if resumed:
            options.overrides = [each for each in options.overrides if not each.startswith("ckpt_path=")]
        more += resumed
    with claimed_directory(config.hydra.run, KEY) as directory:
        run_by_hydra(Job(in_sweep=False), source, options, *more, f"{KEY}={quoted(str(directory))}")


def resumed_overrides(config: DictConfig, settings: Settings) -> list[str]:
    """Return the overrides of a resumed job, and set its directory to that of the run that it continues.

    Raises:
        PolicyError: If there is no such checkpoint, or it contradicts the config.
    """
    is_chosen = under_srun() or is_fixed(config.hydra.run)
    own = Path(config.hydra.run.dir).absolute() if is_chosen else None
    if settings.ckpt_path is None and own is None:
        return []
    from gradpolicy.app.resumed import chosen_checkpoint, resumed_run

    with quieter():
        checkpoint = chosen_checkpoint(settings, own)
        if checkpoint is None:
            return []
        resumed = resumed_run(settings, checkpoint, own)
    chosen = [f"ckpt_path={quoted(str(checkpoint.absolute()))}"]
    if resumed.directory is None:
        return chosen
    with read_write(config), open_dict(config), read_write(config.hydra):
        config.hydra.run.dir = str(resumed.directory.absolute())
    # Hydra's own files remain those of the original command.
    return [*chosen, "hydra.output_subdir=null"]


def run_sweep(source: Source, options: argparse.Namespace, config: DictConfig) -> None:
    """Run the jobs by Hydra's sweeper and launcher; print the summary even if some failed."""
    with claimed_directory(config.hydra.sweep, "hydra.sweep.dir") as directory, termination_exits():
        is_new = is_unused(directory)
        try:
            where = f"hydra.sweep.dir={quoted(str(directory))}"
            run_by_hydra(Job(in_sweep=True), source, options, where)
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
        from gradpolicy.app.run import run

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
        return "ckpt_path=DIRECTORY goes on with a job of the sweep, from the checkpoints in its directory"
    return "ckpt_path=last goes on from the last checkpoint"


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
