"""Finds the checkpoint to resume from or to test."""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.checkpoint_file import check_kind
from gradpolicy.distributed.sharded_checkpoint import find_whole, is_sharded_checkpoint, is_whole
from gradpolicy.errors import PolicyError, brief, nearest
from gradpolicy.lightning.checkpoint_reading import KEY, read_checkpoint
from gradpolicy.lightning.run_record import KINDS, RECORD, RUN, RunRecord

LAST = "last"
LAST_NAME = "last*.ckpt"


def find_checkpoint(
    ckpt_path: str | None, directories: Iterable[Path], task: str | None = None
) -> Path | None:
    """Finds the checkpoint that `ckpt_path` names.

    Args:
        ckpt_path: None; a file; a run directory, which means the newest good one in it; or ``last``, which
            means the newest good one of the newest run in the given directories. `last` passes over jobs of
            sweeps and trials of studies, unless one of the directories is such a job's own.
        directories: Where to look for ``last``: directories of single runs, then the one that holds all runs.
            The first one that holds any run decides.
        task: The ``task_name`` of the runs that `last` considers; None: any.

    Raises:
        PolicyError: If there is none.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == LAST:
        return _last_of(list(directories), task)
    path = Path(ckpt_path).expanduser()
    # Of os.path: Path.exists raises where a name is too long for the file system.
    if os.path.isdir(path) and not is_sharded_checkpoint(path):
        found, bad = _newest_good(_checkpoints_of_run(path))
        _warn_of(bad)
        if found is None:
            raise PolicyError(f"ckpt_path: no good checkpoint in the directory {brief(str(path), most=120)}")
        return found
    if not os.path.exists(path):
        raise PolicyError(f"ckpt_path: {brief(str(path), most=120)} does not exist; {_near(path)}")
    check_kind(path, KEY)
    return path


def _last_of(directories: list[Path], task: str | None) -> Path:
    passed: list[str] = []
    tried: set[Path] = set()
    for directory in directories:
        for run in _runs_newest_first(directory, is_own=directory != directories[-1]):
            if run.directory in tried:
                continue
            tried.add(run.directory)
            reason = run.passed_over(task)
            if reason:
                passed.append(reason)
                continue
            found, bad = _newest_good(_named(run.directory, LAST_NAME))
            if found is None and bad:
                # Another checkpoint of the same run comes before one of another run.
                found, more = _newest_good(_named(run.directory, "*.ckpt"))
                bad += [reason for reason in more if reason not in bad]
            passed += bad
            if found is not None:
                if passed:
                    rank_zero_warn(f"ckpt_path=last means {found}; passed over: {_counted(passed)}")
                return found
            if not bad:
                passed.append(f"{run.directory.name}, which holds no {LAST_NAME}")
    hint = f"; passed over: {_counted(passed)}" if passed else ""
    raise PolicyError(f"ckpt_path=last: no good checkpoint below {', '.join(map(str, directories))}{hint}")


@dataclass(frozen=True)
class FoundRun:
    """A run that was found below a directory.

    Args:
        directory: Its directory.
        record: Its record; None if it left none.
        touched: The newest file time of its checkpoints.
    """

    directory: Path
    record: RunRecord | None
    touched: float

    @property
    def began(self) -> tuple[float, bool, float]:
        """Sorts by when the run began, and puts an original before its copies.

        File times count only where there is no record: copying a file changes them.
        """
        if self.record is None:
            return float("-inf"), True, self.touched
        is_original = os.path.realpath(self.record.directory) == os.path.realpath(self.directory)
        return self.record.started, is_original, self.touched

    def passed_over(self, task: str | None) -> str:
        """Why `last` passes over this run; empty if it does not."""
        if self.record is None:
            return ""
        if self.record.kind != RUN:
            return KINDS[self.record.kind]
        return "" if task in (None, self.record.task) else f"a run of task {self.record.task!r}"


def _runs_newest_first(directory: Path, *, is_own: bool) -> list[FoundRun]:
    """The runs below a directory: those that left a record, and those that left a checkpoint."""
    checkpoints = _named(directory, LAST_NAME)
    if is_own:
        return [FoundRun(directory, None, 0.0)] if checkpoints else []
    touched = {path.parent: 0.0 for path in directory.rglob(RECORD)}
    for path in checkpoints:
        run = _run_of(path, directory)
        touched[run] = max(touched.get(run, 0.0), path.stat().st_mtime)
    found = [FoundRun(run, RunRecord.load(run), time) for run, time in touched.items()]
    return sorted(found, key=lambda run: run.began, reverse=True)


def _run_of(checkpoint: Path, below: Path) -> Path:
    """The directory of the run that wrote a checkpoint."""
    above = [directory for directory in checkpoint.parents if below in directory.parents]
    for directory in above:
        if _is_run_directory(directory):
            return directory
    folder = checkpoint.parent
    is_part_of_run = folder.name == "checkpoints" and folder.parent in (below, *above)
    return folder.parent if is_part_of_run else folder


def _is_run_directory(directory: Path) -> bool:
    return any((directory / name).exists() for name in (RECORD, "config.yaml", ".hydra"))


def _named(directory: Path, name: str) -> set[Path]:
    return {*directory.rglob(name), *find_whole(directory, name)}


def _checkpoints_of_run(directory: Path) -> set[Path]:
    """The checkpoints in a run directory. Below a directory that holds no run, only near the top."""
    if _is_run_directory(directory):
        return _named(directory, "*.ckpt")
    near = (directory, *(path for path in directory.glob("*") if os.path.isdir(path)))
    return {path for parent in near for path in parent.glob("*.ckpt")}


def _newest_good(found: Iterable[Path]) -> tuple[Path | None, list[str]]:
    """The checkpoint that can be read and is furthest in training; and what is wrong with others.

    One named ``last`` comes before one of the same step; file times come last.
    """
    good: list[tuple[int, bool, float, Path]] = []
    bad = []
    for path in sorted(found, key=lambda each: each.stat().st_mtime, reverse=True):
        try:
            if path.is_dir() and not is_whole(path):
                raise PolicyError(f"{KEY}: {path} was not finished")
            step = read_checkpoint(path).get("global_step")
        except PolicyError as error:
            bad.append(str(error).removeprefix(f"{KEY}: "))
            continue
        named_last = path.name.lstrip(".").startswith(LAST)
        good.append((step if isinstance(step, int) else -1, named_last, path.stat().st_mtime, path))
    return max(good)[-1] if good else None, bad


def _warn_of(bad: list[str]) -> None:
    if bad:
        rank_zero_warn(f"{KEY}: passed over: {'; '.join(bad)}")


def _counted(reasons: list[str]) -> str:
    """Lists reasons in one line, equal ones once with their number."""
    return "; ".join(
        reason if number == 1 else f"{reason} ({number})" for reason, number in Counter(reasons).items()
    )


def _near(path: Path) -> str:
    """Names the checkpoints beside the one that does not exist."""
    if not os.path.isdir(path.parent):
        parent = brief(str(path.parent), most=120)
        return f"there is no directory {parent} either; ckpt_path=last finds the newest"
    found = [candidate.name for candidate in path.parent.glob("*.ckpt")]
    return nearest(path.name, found, count=2) or "ckpt_path=last finds the newest"
