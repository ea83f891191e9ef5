"""The directory of a run, shared by its processes and removed if nothing started."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from omegaconf import DictConfig, OmegaConf

from gradpolicy.app.messages import wrong_input_errors
from gradpolicy.app.processes import is_first_rank, under_srun, under_torchrun
from gradpolicy.atomic_file import is_inside
from gradpolicy.errors import PolicyError, brief, warn_user

KEY = "hydra.run.dir"
# A directory named after the time is for one run. Any other name was chosen by the user, and that directory
# may already contain a run.
TIME_IN_NAME = ("${started:", "${now:")
# The lock file, which exists as long as a process writes to the directory.
LOCK = ".lock"
# What a run writes into its directory.
WRITTEN = re.compile(
    r".*\.(csv|db|html|jsonl?|log|safetensors|txt|yaml)|\.hydra|checkpoints|csv|masks|mlflow|pictures|tensorboard"
)
_locked: set[Path] = set()


@contextmanager
def claimed_directory(node: DictConfig, key: str) -> Iterator[Path]:
    """Create and lock the directory of a run or of a sweep, and remove it if it is empty at the end.

    A directory named after the time belongs to one run. All processes of the run share it, and a requeued
    Slurm job uses the same one.

    Args:
        node: The config node with the directory as ``dir``.
        key: The key of that directory, for messages.

    Raises:
        PolicyError: If it cannot be created or written to, another process runs in it, it is named after the
            time and holds another run, or a link in it leads out of it.
    """
    wanted = Path(node.dir).absolute()
    may_hold_run = under_srun() or under_torchrun() or is_fixed(node)
    with locked(wanted, key):
        if not (may_hold_run or is_unused(wanted)):
            raise PolicyError(f"{key}: {brief(str(wanted), most=120)} has another run; start this one again")
        check_links(wanted, key)
        yield wanted


def is_fixed(node: DictConfig) -> bool:
    """Return True if a directory is not named after the time, so that it may already contain a run."""
    template: Any = OmegaConf.to_container(node, resolve=False)
    return not any(word in template["dir"] for word in TIME_IN_NAME)


@contextmanager
def locked(directory: Path, key: str) -> Iterator[None]:
    """Create a directory and lock it against other processes, as long as this process lives.

    Only the first rank locks it, for all ranks.

    Args:
        directory: The directory; removed at the end if it did not exist and is empty.
        key: The config key that names it, for messages.

    Raises:
        PolicyError: If another process has locked it, or it cannot be created.
    """
    directory = directory.absolute()
    is_first = is_first_rank() and os.environ.get("NODE_RANK", "0") == "0"
    with empty_directories_removed(directory):
        if not is_first or directory in _locked:
            yield
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = _lock(directory, key)
        except OSError as error:
            raise PolicyError(f"{key}: {brief(str(error), most=160)}") from error
        _locked.add(directory)
        try:
            yield
        finally:
            _locked.discard(directory)
            (directory / LOCK).unlink(missing_ok=True)
            file.close()


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


def check_links(directory: Path, key: str) -> None:
    """Check that a run writes to its directory alone, and not through links or into pipes in it.

    Raises:
        PolicyError: For a link that leads out of the directory, and for what is no file.
    """
    here = directory.iterdir() if directory.is_dir() else ()
    written = (path for path in here if WRITTEN.fullmatch(path.name))
    for path in (below for each in written for below in (each, *each.rglob("*"))):
        inside = is_inside(path, directory)
        if not inside or (os.path.exists(path) and not (path.is_file() or path.is_dir())):
            what = "is neither a file nor a directory" if inside else "is a link out of the directory"
            raise PolicyError(f"{key}: {brief(str(path), most=160)} {what}; a run would write to it")


class RunDirectory:
    """A run's directory, whose files are kept once the run has started.

    Args:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started = False
        self._was_unused = is_unused(path)

    def start(self) -> None:
        """Mark the run as started, so that its files are kept."""
        self.started = True

    def clear_unless_started(self) -> None:
        """Remove the files of this run, unless it has started or the directory was not empty before."""
        if not self.started and self._was_unused and is_first_rank() and self.path.is_dir():
            for entry in (entry for entry in self.path.iterdir() if entry.name != LOCK):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def is_unused(path: Path) -> bool:
    """Return True if a directory has only the lock and Hydra's files."""
    return not path.exists() or all(
        entry.name in (".hydra", LOCK) or (entry.suffix == ".log" and not entry.stat().st_size)
        for entry in path.iterdir()
    )


@contextmanager
def run_directory(path: Path) -> Iterator[RunDirectory]:
    """Lock a run's directory, and remove the run's files if invalid input ends it before it has started.

    Args:
        path: The directory.
    """
    with locked(path, KEY):
        directory = RunDirectory(path)
        try:
            yield directory
        except wrong_input_errors():
            directory.clear_unless_started()
            raise


@contextmanager
def empty_directories_removed(directory: Path) -> Iterator[None]:
    """Remove a directory and its parents at the end, if they did not exist at the start and are empty."""
    # Not Path.exists, which raises if a name is too long for the file system.
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    try:
        yield
    finally:
        if is_first_rank():
            for path in missing:
                if os.path.isdir(path) and not any(path.iterdir()):
                    path.rmdir()
