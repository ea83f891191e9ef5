"""The directory of a run, shared by its processes and removed if nothing started."""

import fcntl
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from omegaconf import DictConfig, OmegaConf

from gradpolicy.app.messages import wrong_input_errors
from gradpolicy.app.processes import is_first_rank
from gradpolicy.errors import PolicyError, brief, warn_user

KEY = "hydra.run.dir"
# A directory named after the time is for one run. Any other name was chosen by the user, and that directory
# may already contain a run.
TIME_IN_NAME = ("${started:", "${now:")
# The lock file, which exists as long as a process writes to the directory.
LOCK = ".lock"


@contextmanager
def locked(directory: Path, key: str, *, keeps: bool = True) -> Iterator[Path]:
    """Create the directory of a run or of a sweep, and lock it as long as this process lives.

    Only the first rank does, for all ranks.

    Args:
        directory: The directory; removed at the end, with its new parents, if it is empty then.
        key: The config key that names it, for messages.
        keeps: False to remove at the end what was written into it, as by Hydra for a plan.

    Raises:
        PolicyError: If another process has locked it, or it cannot be created.
    """
    directory = directory.absolute()
    is_first = is_first_rank() and os.environ.get("NODE_RANK", "0") == "0"
    if not is_first:
        yield directory
        return
    # Not Path.exists, which raises if a name is too long for the file system.
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    with ExitStack() as block:
        block.callback(_remove_empty, missing)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            block.enter_context(_lock(directory, key))
        except OSError as error:
            raise PolicyError(f"{key}: {brief(str(error), most=160)}") from error
        block.callback((directory / LOCK).unlink, missing_ok=True)
        if not keeps:
            block.callback(_remove_others, directory, {path.name for path in directory.iterdir()})
        yield directory


def is_fixed(node: DictConfig) -> bool:
    """Return True if a directory is not named after the time, so that it may already contain a run."""
    template: Any = OmegaConf.to_container(node, resolve=False)
    return not any(word in template["dir"] for word in TIME_IN_NAME)


def _lock(directory: Path, key: str) -> IO[bytes]:
    """Open the lock of a directory and take it, until the file is closed or the process ends.

    Raises:
        PolicyError: If another process has it, or the file is something else.
    """
    path = directory / LOCK
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or path.stat().st_size):
        raise PolicyError(f"{key}: {brief(str(path), most=120)} is no lock of a run; move it away")
    file = path.open("ab")
    try:
        # Not flock, whose lock a worker would inherit that outlives a killed run by seconds.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise BlockingIOError("removed by the process that had it")
    except (BlockingIOError, PermissionError) as error:
        file.close()
        where = brief(str(directory), most=120)
        raise PolicyError(
            f"{key}: another process runs in {where}; wait until it ends, or choose another directory"
        ) from error
    except OSError as error:
        warn_user(f"{key}: {directory} cannot be locked ({error.strerror}): start no other run in it")
    return file


@dataclass
class RunDirectory:
    """A run's directory.

    Args:
        path: The directory.
        started: True if the run has started, so that its files are kept.
    """

    path: Path
    started: bool = False


@contextmanager
def run_directory(path: Path) -> Iterator[RunDirectory]:
    """Remove what a run writes into its directory, which is locked, if it ends before it has started.

    A directory that was not empty before keeps its files, as does that of a run that fails for another reason
    than invalid input.

    Args:
        path: The directory.
    """
    directory, was_unused, keeps = RunDirectory(path), is_unused(path), False
    try:
        yield directory
    except BaseException as error:
        keeps = not isinstance(error, wrong_input_errors())
        raise
    finally:
        if was_unused and is_first_rank() and not (directory.started or keeps):
            _remove_others(path, {LOCK})


def is_unused(path: Path) -> bool:
    """Return True if a directory has only the lock and Hydra's files."""
    return not path.exists() or all(
        entry.name in (".hydra", LOCK) or (entry.suffix == ".log" and not entry.stat().st_size)
        for entry in path.iterdir()
    )


def _remove_others(directory: Path, kept: Collection[str]) -> None:
    for entry in (entry for entry in directory.iterdir() if entry.name not in kept):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _remove_empty(directories: Iterable[Path]) -> None:
    for path in directories:
        if os.path.isdir(path) and not any(path.iterdir()):
            path.rmdir()
