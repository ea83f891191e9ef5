"""The log of a run: its tables, its warnings, and the error that ended it."""

import io
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from gradpolicy.display import WIDTH
from gradpolicy.errors import PolicyError

# Logs all that a run prints, into the file that Hydra's `job_logging` opens.
LOG = logging.getLogger("gradpolicy.run")
LIGHTNING = tuple(logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric"))
# Warnings that every small run gives and that need no change.
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
    """Log what a run prints, and the error that ends the block.

    Args:
        first_rank: If False, this process neither prints nor logs.

    Yields:
        A console for tables, 120 columns wide where the output is no terminal.
    """
    if not first_rank:
        yield Console(quiet=True)
        return
    # Not to the terminal, where it is printed already.
    files = [each for each in logging.getLogger().handlers if isinstance(each, logging.FileHandler)]
    loggers = [LOG, *(logger for logger in LIGHTNING if not logger.propagate)]
    former = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [*logger.handlers, *files], False
    LOG.setLevel(logging.INFO)
    try:
        yield LoggedConsole(width=None if sys.stdout.isatty() else WIDTH)
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
    """Prints and logs."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print, and log the same as plain text."""
        super().print(*objects, **settings)
        text = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        with text.capture() as captured:
            text.print(*objects, **settings)
        LOG.info(captured.get().rstrip())


def _explained(error: BaseException) -> str:
    if isinstance(error, PolicyError):
        return f"error: {error}"
    if isinstance(error, Exception):
        return "".join(traceback.format_exception(error)).rstrip()
    return f"ended by {type(error).__name__}"


@contextmanager
def quieter() -> Iterator[None]:
    """Hide messages that Lightning gives in every run; print and log each warning in one line."""
    levels = [logger.level for logger in LIGHTNING]
    for logger in LIGHTNING:
        logger.setLevel(logging.WARNING)
    # The user asked for a profiler's report.
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
