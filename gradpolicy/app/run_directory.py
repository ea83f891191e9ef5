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

# A directory named after the time is for one run. Any other name was chosen by the user, and that directory
# may already contain a run.
TIME_IN_NAME = ("${started:", "${now:")
# The lock file, which exists as long as a process writes to the directory.
LOCK = ".lock"


@dataclass
class RunDirectory:
    """The directory of a run or of a sweep.

    Args:
        path: The directory.
        started: True if the run has started, so that its files are kept.
    """

    path: Path
    started: bool = False


@contextmanager
def locked(path: Path, key: str, *, plan_only: bool = False) -> Iterator[RunDirectory]:
    """Create the directory of a run or of a sweep, and lock it as long as this process lives.

    What was written into it is removed if nothing has started, unless there were files before, or an error
    other than invalid input ended the block. Only the first rank does this, for all ranks.

    Args:
        path: The directory; removed at the end, with its new parents, if it is empty then.
        key: The config key that names it, for messages.
        plan_only: True to remove what was written also if there were files before.

    Raises:
        PolicyError: If another process has locked it, or it cannot be created.
    """
    directory = RunDirectory(path.absolute())
    path = directory.path
    if not is_first_rank() or os.environ.get("NODE_RANK", "0") != "0":
        yield directory
        return
    # Not Path.exists, which raises if a name is too long for the file system.
    missing = [each for each in (path, *path.parents) if not os.path.exists(each)]
    with ExitStack() as block:
        block.callback(_remove_empty, missing)
        try:
            path.mkdir(parents=True, exist_ok=True)
            block.enter_context(_lock(path, key))
        except OSError as error:
            raise PolicyError(f"{key}: {brief(str(error), most=160)}") from error
        block.callback((path / LOCK).unlink, missing_ok=True)
        before = {each.name for each in path.iterdir()}
        try:
            yield directory
        except BaseException as error:
            directory.started |= not isinstance(error, wrong_input_errors())
            raise
        finally:
            if not directory.started and (plan_only or before == {LOCK}):
                _remove_others(path, before)


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


def _remove_others(directory: Path, kept: Collection[str]) -> None:
    for entry in (entry for entry in directory.iterdir() if entry.name not in kept):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _remove_empty(directories: Iterable[Path]) -> None:
    for path in directories:
        if os.path.isdir(path) and not any(path.iterdir()):
            path.rmdir()
