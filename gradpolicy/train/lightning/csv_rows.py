"""Rows of a CSVLogger: appended by a resumed run, after later ones are removed."""

import csv
import os
import warnings
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.atomic_file import atomic_open


def append_rows(logger: CSVLogger) -> None:
    """Make a CSVLogger append to the file of its version, which Lightning would delete."""
    path = Path(logger.log_dir) / "metrics.csv"
    aside = path.with_name(".metrics.csv.kept")
    if path.is_file():
        os.replace(path, aside)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Previous log files in this directory will be deleted")
        writer = logger.experiment
    if aside.is_file():
        os.replace(aside, path)
        with path.open(newline="", encoding="utf-8") as file:
            writer.metrics_keys = next(csv.reader(file), [])


def count_rows(trainer: Trainer) -> list[int]:
    """Write the pending rows of each CSVLogger, and return the numbers of lines in their files."""
    loggers = _csv_loggers(trainer)
    for logger in loggers:
        logger.save()
    return [len(_lines(_file_of(logger))) for logger in loggers]


def cut_rows(trainer: Trainer, numbers: list[int]) -> None:
    """Truncate the file of each CSVLogger to its first lines, and keep the names of its columns."""
    for logger, number in zip(_csv_loggers(trainer), numbers, strict=False):
        path = _file_of(logger)
        lines = _lines(path)
        if len(lines) < number:
            rank_zero_warn(f"{path} lacks rows of the steps before the checkpoint")
        elif len(lines) > max(number, 1):
            with atomic_open(path, "wb") as file:
                file.writelines(lines[: max(number, 1)])


def _csv_loggers(trainer: Trainer) -> list[CSVLogger]:
    if not trainer.is_global_zero:
        return []
    return [logger for logger in trainer.loggers if isinstance(logger, CSVLogger)]


def _file_of(logger: CSVLogger) -> Path:
    return Path(logger.experiment.metrics_file_path)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.is_file() else []
