"""Keeps what a run prints in a file: tables, warnings and errors, without colours and progress bars."""

import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from rich import get_console
from rich.console import Console
from rich.file_proxy import FileProxy

from gradpolicy.display import WIDTH
from gradpolicy.errors import PolicyError

TRAIN_LOG = "train.log"
ANSI = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
# A bar of tqdm is drawn over itself.
REDRAWN = ("\r", "\x1b[A")


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
def kept_output(path: Path, *, keeps: bool = True) -> Iterator[Console]:
    """Writes what is printed within the block to a file as well, and the error that ends the block.

    Args:
        path: The file; what it holds already stays.
        keeps: Whether this process prints and writes at all: only the first rank of a run does.

    Yields:
        A console for tables, 120 columns wide where the output is no terminal.
    """
    if not keeps:
        yield Console(quiet=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", buffering=1) as log:
        out, err = LoggedStream(sys.stdout, log), LoggedStream(sys.stderr, log)
        with redirect_stdout(out), redirect_stderr(err):
            try:
                yield LoggedConsole(log, width=None if sys.stdout.isatty() else WIDTH)
            except BaseException as error:
                log.write(_last_words(error))
                raise


class LoggedConsole(Console):
    """Prints where a console prints, and into a file."""

    def __init__(self, log: TextIO, **settings: Any) -> None:
        super().__init__(**settings)
        self._log = Console(file=log, width=WIDTH, color_system=None)

    def print(self, *objects: Any, **settings: Any) -> None:
        """Prints twice."""
        super().print(*objects, **settings)
        self._log.print(*objects, **settings)


class LoggedStream(FileProxy):
    """Writes to a stream, and to a log.

    The consoles of rich write to the stream inside of a ``FileProxy``: so their bars pass the log by. While
    one is drawn on a terminal, other text has to go through its console, as rich itself has it.
    """

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        super().__init__(get_console(), stream)
        self._stream, self._log = stream, log

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Writes to both."""
        if not any(mark in text for mark in REDRAWN):
            self._log.write(ANSI.sub("", text))
        if self.isatty() and get_console()._render_hooks:
            return super().write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """Flushes the stream."""
        super().flush()
        self._stream.flush()


def _last_words(error: BaseException) -> str:
    """What the log says of the error that ended the run."""
    if isinstance(error, PolicyError):
        return f"error: {error}\n"
    if isinstance(error, Exception):
        return "".join(traceback.format_exception(error))
    return f"ended by {type(error).__name__}\n"


@contextmanager
def quieter() -> Iterator[None]:
    """Hides messages that Lightning gives in every run, and prints each warning in one line."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    # A profiler's report is what it was asked for.
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
    with warnings.catch_warnings():
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        formatted, warnings.formatwarning = warnings.formatwarning, _one_line
        try:
            yield
        finally:
            warnings.formatwarning = formatted
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"warning: {' '.join(str(message).split())}\n"
