"""The run directory: one for all processes of a run, and none for a run that never began."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from omegaconf import OmegaConf

from gradpolicy.errors import PolicyError
from gradpolicy.launch.errors import wrong_input_errors
from gradpolicy.launch.ranks import is_first_rank

STAMP = "%Y-%m-%d_%H-%M-%S-%f"
STORE_KEY = "gradpolicy/started"


def started() -> str:
    """When this run was started, for the name of its directory: the same on all its processes.

    Under torchrun the first process tells the others by the store that torchrun's agent keeps; a restarted
    group of workers finds what the first one said. Under Slurm's `srun` the job and step number stand for it:
    a job that was requeued finds its directory again.
    """
    now = datetime.now().strftime(STAMP)[:-3]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _agreed(now)
    if int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_ID" in os.environ:
        return f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    return now


def _agreed(value: str) -> str:
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    if os.environ.get("RANK", "0") == "0":
        store.compare_set(STORE_KEY, "", value)
    return store.get(STORE_KEY).decode()


OmegaConf.register_new_resolver("started", started, use_cache=True, replace=True)


class RunDirectory:
    """A run's directory, and whether the run has begun to fill it.

    Args:
        path: The directory, as Hydra made it for this job.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = not _holds_only_hydras(path)

    def begin(self) -> None:
        """From here on the directory stays, whatever happens."""
        self.begun = True

    def remove_unless_begun(self) -> None:
        """Removes the directory if this run has put nothing into it that someone would miss."""
        if not self.begun and is_first_rank():
            shutil.rmtree(self.path, ignore_errors=True)


def _holds_only_hydras(path: Path) -> bool:
    """Whether there is nothing but what Hydra puts into the directory of a job before it starts."""
    return path.is_dir() and all(
        entry.name == ".hydra" or (entry.suffix == ".log" and not entry.stat().st_size)
        for entry in path.iterdir()
    )


@contextmanager
def run_directory(path: Path) -> Iterator[RunDirectory]:
    """Removes the directory again if wrong input ends the run before it has begun.

    A directory that already held something, such as that of the run that is resumed, is left alone.
    """
    directory = RunDirectory(path)
    try:
        yield directory
    except wrong_input_errors():
        directory.remove_unless_begun()
        raise


def check_writable(path: Path, key: str) -> None:
    """Makes sure that a run can leave something in a directory, before it has trained for hours.

    Args:
        path: The directory, which need not exist yet.
        key: The config key that names it.

    Raises:
        PolicyError: If it cannot be made or written to.
    """
    path = path.absolute()
    with empty_directories_removed(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise PolicyError(f"{key}: nothing can be written to {path}: {reason}") from error


@contextmanager
def empty_directories_removed(directory: Path) -> Iterator[None]:
    """Removes the directories that were made for a run, as far up as they were, where they end up empty."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        yield
    finally:
        if is_first_rank():
            for path in missing:
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
