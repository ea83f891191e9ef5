"""The program: reads the command line, checks everything it asks for, then hands over to Hydra."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from gradpolicy.launch.compose import VERSION_BASE, Source, check_jobs, compose_job, fixed_overrides
from gradpolicy.launch.errors import FAILED, WRONG_INPUT, WRONG_INPUT_ERRORS, explain, report_error
from gradpolicy.launch.ranks import is_first_rank
from gradpolicy.launch.report import RESULT, Result
from gradpolicy.launch.rundir import remove
from gradpolicy.launch.sweep import RESULTS, SUMMARY, collect, summarize

CONFIG_NAME = "train"


def main(config_dir: Path, arguments: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
        config_dir: The directory of configs.
        arguments: The command line; that of this process unless given.

    Returns:
        The exit code: 0, 1 for a failure, 2 for wrong input, 143 when told to go.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = get_args_parser().parse_intermixed_args(arguments)
    # Hydra reads flags only before or after all overrides; a person may write `seed=3 -m policy=none,guided`.
    flags = [word for word in arguments if word not in options.overrides]
    arguments = [*flags, *options.overrides]
    show_traceback = any(line.startswith("debug=") for line in options.overrides)
    try:
        with command_line(arguments):
            if _only_tells(options):
                _hand_over(config_dir, lambda config: None)
                return 0
            return start(config_dir, arguments, options)
    except WRONG_INPUT_ERRORS as error:
        if is_first_rank():
            report_error(error, show_traceback or "extras.traceback=true" in options.overrides)
        return WRONG_INPUT
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else FAILED


def start(config_dir: Path, arguments: list[str], options: Namespace) -> int:
    """Checks every job, settles the directory, and lets Hydra run the job or the jobs."""
    config_dir = Path(options.config_path or config_dir).absolute()
    more = str(Path(options.config_dir).absolute()) if options.config_dir else None
    source = Source(config_dir, options.config_name or CONFIG_NAME, more)
    first = compose_job(source, fixed_overrides(options.overrides))
    multirun = options.multirun or first.hydra.mode == RunMode.MULTIRUN
    check_jobs(source, options.overrides, multirun)
    key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    directory = Path(first.hydra.sweep.dir if multirun else first.hydra.run.dir).absolute()
    settled = [*arguments, f"{key}={quoted(str(directory))}"]
    if not is_first_rank() and not any(line.startswith("hydra.output_subdir=") for line in arguments):
        settled.append("hydra.output_subdir=null")
    job = Job(in_sweep=multirun)
    with command_line(settled):
        try:
            _hand_over(config_dir, job)
        finally:
            if multirun and is_first_rank():
                _end_sweep(directory, resolved_head(first))
    if job.error is not None:
        raise job.error
    return 0


class Job:
    """The function that Hydra calls for each job.

    Args:
        in_sweep: Whether it is one of several; a failed one then raises where Hydra sees it, and the others
            go on.
    """

    def __init__(self, in_sweep: bool) -> None:
        self.in_sweep = in_sweep
        self.error: Exception | None = None

    def __call__(self, config: DictConfig) -> float | None:
        """Runs a job and leaves its result where the summary finds it."""
        from gradpolicy.launch.run import run

        hydra_config = HydraConfig.get()
        overrides = list(hydra_config.overrides.task)
        directory = Path(hydra_config.runtime.output_dir)
        place = directory / RESULT
        if self.in_sweep:
            place = Path(hydra_config.sweep.dir) / RESULTS / f"{hydra_config.job.num}.json"
        try:
            result = run(config, overrides)
        except Exception as error:
            if self.in_sweep:
                Result(overrides, status="failed", error=explain(error), directory=str(directory)).save(place)
                raise
            self.error = error
            return None
        if is_first_rank() and (self.in_sweep or result.status == "completed"):
            result.save(place)
        return result.optimized


@contextmanager
def command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Makes these the program's arguments for a while, and has Hydra raise its errors instead of printing."""
    former, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [former[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = former
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def quoted(value: str) -> str:
    """Writes a value so that Hydra reads it as it is.

    Example:
        >>> quoted("a=b, c")
        "'a=b, c'"
    """
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _hand_over(config_dir: Path, job: Callable[[DictConfig], Any]) -> None:
    hydra.main(version_base=VERSION_BASE, config_path=str(config_dir), config_name=CONFIG_NAME)(job)()


def _only_tells(options: Namespace) -> bool:
    """Whether the command line asks Hydra for information, not for a run."""
    asked = ("help", "hydra_help", "version", "info", "cfg", "shell_completion", "experimental_rerun")
    return any(getattr(options, name, None) for name in asked)


def resolved_head(config: DictConfig) -> tuple[str | None, str]:
    """What a sweep compares its jobs by, and which value is the best."""
    return config.get("optimized_metric"), config.get("optimized_mode") or "max"


def _end_sweep(directory: Path, head: tuple[str | None, str]) -> None:
    """Prints the summary; a sweep in which no job began leaves nothing."""
    results = collect(directory)
    if any(result.status != "failed" for result in results):
        summarize(results, *head, Console(), directory / SUMMARY)
    elif not any(Path(result.directory).is_dir() for result in results):
        remove(directory)
