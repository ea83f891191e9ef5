"""The program: parses the command line, checks every job, and runs them by Hydra."""

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from gradpolicy.app import Exit
from gradpolicy.app.config import VERSION_BASE, Settings, Source, check_config, fixed_overrides, sweep_values
from gradpolicy.app.messages import explain, wrong_input_errors
from gradpolicy.app.processes import is_first_rank, quoted, termination_exits, under_srun
from gradpolicy.app.run_directory import RunDirectory, is_fixed, locked
from gradpolicy.errors import PolicyError
from gradpolicy.insight.run_log import quieter
from gradpolicy.insight.sweep_summary import summarize

# Options of Hydra that print something instead of running a job.
INFORMATION = ("help", "hydra_help", "version", "cfg", "info", "shell_completion")
# What a command line has for this program, not for Hydra.
READ_HERE = ("overrides", "config_path", "config_name", "config_dir")
# Errors of a full disk, a quota and a limit on the size of files.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(config_dir: Path, words: Sequence[str]) -> int:
    """Run the program.

    Args:
        config_dir: The directory of configs.
        words: The command line.

    Returns:
        The exit code: 0, 1 for a failure, 2 for invalid input, 3 for a violated guarantee, 130 for Ctrl-C,
        143 for SIGTERM.
    """
    show_traceback = False
    try:
        options = parse(words)
        source = Source(Path(options.config_path or config_dir).absolute(), options.config_name or "train")
        # Modules beside the configs, and those of the current directory, may be named in a config.
        given = [Path(each).absolute() for each in (options.config_path, options.config_dir) if each]
        sys.path += [
            str(each) for each in (*(path.parent for path in given), Path.cwd()) if str(each) not in sys.path
        ]
        if options.config_dir:
            options.overrides.append(search_path(given[-1]))
        if any(getattr(options, name) for name in INFORMATION):
            run_by_hydra(source, options)
            return 0
        with source.open():
            config = source.compose(fixed_overrides(options.overrides))
            show_traceback = OmegaConf.select(config, "extras.traceback") is True
            settings = check_jobs(source, options, config)
            if settings is None:
                run_sweep(source, options, config)
            else:
                run_job(source, options, config, settings)
        return 0
    except (KeyboardInterrupt, SystemExit) as leaving:
        # Lightning raises SystemExit if Ctrl-C interrupts training.
        interrupts = any(isinstance(each, KeyboardInterrupt) for each in (leaving, leaving.__context__))
        code = Exit.INTERRUPTED if interrupts else getattr(leaving, "code", Exit.FAILED)
        if code in (Exit.INTERRUPTED, Exit.TERMINATED) and is_first_rank():
            said = "interrupted" if interrupts else "ended by SIGTERM"
            print(f"{said}; {_how_to_resume(words)}", file=sys.stderr)
        return code if isinstance(code, int) else Exit.FAILED
    except wrong_input_errors() as error:
        if show_traceback:
            traceback.print_exception(error)
        print(f"error: {explain(error)}", file=sys.stderr)
        return getattr(error, "exit_code", Exit.WRONG_INPUT)
    except OSError as error:
        if show_traceback or error.errno not in NO_ROOM:
            raise
        print(f"error: {error.strerror}", file=sys.stderr)
        return Exit.FAILED


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line: Hydra's options and overrides, in any order."""
    parser = argparse.ArgumentParser(prog="gradpolicy", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for flags in ("--help -h", "--run -r", "--multirun -m", "--shell-completion -sc"):
        parser.add_argument(*flags.split(), action="store_true")
    for flag in ("--hydra-help", "--version", "--resolve"):
        parser.add_argument(flag, action="store_true")
    for flags in ("--config-path -cp", "--config-name -cn", "--config-dir -cd", "--cfg -c", "--package -p"):
        parser.add_argument(*flags.split())
    parser.add_argument("--info", "-i", nargs="?", const="all")
    return parser.parse_intermixed_args(words)


def check_jobs(source: Source, options: argparse.Namespace, config: DictConfig) -> Settings | None:
    """Check every job of a command line; call it within :meth:`Source.open`.

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
        return check_config(config)
    for override in sweep_values(config, overrides):
        check_config(source.compose([*fixed_overrides(overrides), override]))
    return None


def search_path(directory: Path) -> str:
    """Return the override by which configs of a second directory are found, as of ``--config-dir``.

    Raises:
        PolicyError: If there is no such directory.
    """
    if not directory.is_dir():
        raise PolicyError(f"--config-dir: {directory} does not exist")
    return f"hydra.searchpath=[{quoted(f'file://{directory}')},'pkg://gradpolicy.conf']"


def run_by_hydra(
    source: Source, options: argparse.Namespace, *overrides: str, directory: RunDirectory | None = None
) -> None:
    """Call `hydra.main`, which creates the directories, sets up logging, and runs each job.

    Args:
        source: The directories of configs.
        options: The command line.
        *overrides: Further overrides.
        directory: The directory of a single job; None for a sweep.

    Raises:
        Exception: The first error of a job in this process.
    """
    errors, process = [], os.getpid()

    def run_one(config: DictConfig) -> float | None:
        from gradpolicy.app.run import run

        job = HydraConfig.get()
        own = directory or RunDirectory(Path(job.runtime.output_dir))
        try:
            return run(config, list(job.overrides.task), own).optimized
        except Exception as error:
            if os.getpid() != process:
                # A launcher's worker, which has a copy of this function.
                raise
            # Hydra would print a line of its own before an error that it gets.
            errors.append(error)
            return None

    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in vars(options).items()
        if value and name not in READ_HERE
    ]
    # Hydra is initialised again, by `hydra.main`.
    GlobalHydra.instance().clear()
    # Hydra then raises errors instead of printing them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    former = sys.argv
    sys.argv = [former[0], *flags, *options.overrides, *overrides]
    try:
        program = hydra.main(str(source.directory), source.name, VERSION_BASE)
        program(run_one)()
    finally:
        sys.argv = former
    if errors:
        raise errors[0]


def run_job(source: Source, options: argparse.Namespace, config: DictConfig, settings: Settings) -> None:
    """Run one job; one that is resumed runs in the directory of the run that it continues.

    Raises:
        PolicyError: If there is no such checkpoint, or it contradicts the config.
    """
    key, path = "hydra.run.dir", Path(config.hydra.run.dir).absolute()
    resumed, more = None, []
    is_chosen = under_srun() or is_fixed(config.hydra.run)
    if settings.train and not settings.plan_only and (is_chosen or settings.ckpt_path is not None):
        from gradpolicy.app.resume import resumed_run

        with quieter():
            resumed = resumed_run(settings, path if is_chosen else None)
    if resumed is not None:
        more.append(f"ckpt_path={quoted(str(resumed.checkpoint.absolute()))}")
        path = resumed.directory or path
    if settings.plan_only or not is_first_rank() or (resumed is not None and resumed.directory is not None):
        # Hydra's own files remain those of the original command.
        more.append("hydra.output_subdir=null")
    with locked(path, key, plan_only=settings.plan_only) as own:
        run_by_hydra(source, options, *more, f"{key}={quoted(str(own.path))}", directory=own)


def run_sweep(source: Source, options: argparse.Namespace, config: DictConfig) -> None:
    """Run the jobs by Hydra's sweeper and launcher; print the summary even if some failed."""
    key, plan_only = "hydra.sweep.dir", config.get("plan_only") is True
    with locked(Path(config.hydra.sweep.dir), key, plan_only=plan_only) as own, termination_exits():
        own.started = not plan_only
        try:
            more = ["hydra.output_subdir=null"] if plan_only else []
            run_by_hydra(source, options, f"{key}={quoted(str(own.path))}", *more)
        finally:
            if is_first_rank():
                metric, mode = config.get("optimized_metric"), config.get("optimized_mode") or "max"
                summarize(own.path, metric, mode, report=OmegaConf.select(config, "extras.report") is True)


def _how_to_resume(words: Sequence[str]) -> str:
    if {"-m", "--multirun"} & set(words):
        return "ckpt_path=DIRECTORY goes on with a job of the sweep, from the checkpoints in its directory"
    return "ckpt_path=last goes on from the last checkpoint"
