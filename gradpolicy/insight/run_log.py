"""The output of a run: tables, warnings, results, and the error that ended it."""

import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from gradpolicy.display import WIDTH
from gradpolicy.errors import PolicyError
from gradpolicy.insight.run_files import Result

# Logs the output of a run to the file that Hydra's `job_logging` opens.
LOG = logging.getLogger("gradpolicy.run")
LIGHTNING = tuple(logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric"))
# Warnings of every small run that can be ignored.
QUIET = (
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*treespec, LeafSpec.*",
    ".*Grad strides do not match bucket view strides.*",
    ".*could not find the monitored key in the returned metrics.*",
    ".*You defined a `validation_step` but have no `val_dataloader`.*",
)


@contextmanager
def logged_run(*, first_rank: bool = True) -> Iterator[Console]:
    """Log the output of a run, and the error that ends the block.

    Args:
        first_rank: If False, this process neither prints nor logs.

    Yields:
        A console for tables, 120 columns wide if the output is no terminal.
    """
    if not first_rank:
        yield Console(quiet=True)
        return
    # Not to the terminal, where it is already printed.
    files = [each for each in logging.getLogger().handlers if isinstance(each, logging.FileHandler)]
    loggers = [LOG, *(logger for logger in LIGHTNING if not logger.propagate)]
    former = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [*logger.handlers, *files], False
    LOG.setLevel(logging.INFO)
    try:
        yield LoggedConsole(width=None if sys.stdout.isatty() else WIDTH, record=True)
    except BaseException as error:
        LOG.error(_explained(error))
        raise
    finally:
        for logger, handlers, propagate in former:
            logger.handlers, logger.propagate = handlers, propagate


def say(text: str) -> None:
    """Print a line, and log it."""
    print(text, flush=True)
    LOG.info(text)


class LoggedConsole(Console):
    """A console that also logs what it prints."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print, and log as plain text."""
        super().print(*objects, **settings)
        LOG.info(self.export_text().rstrip())


def _explained(error: BaseException) -> str:
    if isinstance(error, PolicyError):
        return f"error: {error}"
    if isinstance(error, Exception):
        return "".join(traceback.format_exception(error)).rstrip()
    return f"ended by {type(error).__name__}"


@contextmanager
def quieter() -> Iterator[None]:
    """Hide messages of Lightning that appear in every run; print and log each warning in one line."""
    levels = [logger.level for logger in LIGHTNING]
    for logger in LIGHTNING:
        logger.setLevel(logging.WARNING)
    # The user wants the profiler's report.
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
    with warnings.catch_warnings():
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        formatted, warnings.formatwarning = warnings.formatwarning, _one_line
        try:
            yield
        finally:
            warnings.formatwarning = formatted
            for logger, level in zip(LIGHTNING, levels, strict=True):
                logger.setLevel(level)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    text = f"warning: {' '.join(str(message).split())}"
    LOG.warning(text)
    return f"{text}\n"


# ---- results


def print_results(result: Result, optimized: str | None, report: Path, console: Console) -> None:
    """Print the last lines of a run: its main metrics, its duration and the path of its report.

    Args:
        result: The result.
        optimized: The metric by which runs are compared.
        report: The report. If it was not written, the directory of the run is printed.
        console: The console.
    """
    lines = {name: f"{value:.4g}" for name, value in main_metrics(result.metrics, optimized).items()}
    lines["time"] = duration(result.seconds)
    lines |= (
        {"report": str(report.absolute())} if report.is_file() else {"run": str(report.parent.absolute())}
    )
    width = max(map(len, lines))
    console.print("Results", style="bold")
    for name, value in lines.items():
        # A wrapped path could not be copied.
        console.print(f"  {name:<{width}}  {value}", markup=False, highlight=False, soft_wrap=True)


def main_metrics(metrics: Mapping[str, float], optimized: str | None) -> dict[str, float]:
    """Return the main metrics: those of the test, or else of validation, or of training.

    The metric by which runs are compared is always included.

    Example:
        >>> main_metrics({"train/loss": 0.1, "val/loss": 0.2, "val/loss_best": 0.15}, "val/loss_best")
        {'val/loss': 0.2, 'val/loss_best': 0.15}
    """
    for stage in ("test/", "val/", "train/", ""):
        chosen = sorted(name for name in metrics if name.startswith(stage) and not name.startswith("policy/"))
        if chosen:
            break
    return {name: metrics[name] for name in [*chosen, optimized or ""] if name in metrics}


def duration(seconds: float) -> str:
    """Format a duration for reading.

    Example:
        >>> duration(8.25), duration(75), duration(3725)
        ('8.2 s', '1 min 15 s', '1 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
