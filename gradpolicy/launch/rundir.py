"""The run directory: one for all processes of a run, and none for a run that never began."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gradpolicy.errors import PolicyError, brief
from gradpolicy.launch.errors import wrong_input_errors
from gradpolicy.launch.ranks import is_first_rank

STAMP = "%Y-%m-%d_%H-%M-%S-%f"
STORE_KEY = "gradpolicy/started"
CLAIMED_KEY = "gradpolicy/claimed"
# A directory named so is meant for one run; any other is a person's choice, and may hold a run already.
STAMPED = ("${started:", "${now:")
# Where callbacks and loggers write: the key of a node that names a directory. A callback of the user's own
# may read from its `directory`.
WRITTEN_TO = {"callbacks": "dirpath", "logger": "save_dir"}


def started() -> str:
    """When this run was started, for the name of its directory: the same on all its processes.

    Under torchrun the first process tells the others by the store that torchrun's agent keeps; a restarted
    group of workers finds what the first one said. Under Slurm's `srun` the job and step number stand for it:
    a job that was requeued finds its directory again.
    """
    if _under_torchrun():
        return agreed(STORE_KEY, _now)
    if _under_srun():
        return f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    return _now()


def agreed(key: str, say: Callable[[], str]) -> str:
    """What the first process says, once: the same on all processes of a torchrun, restarted ones included.

    Args:
        key: What it is about.
        say: Gives the first process's word; called where nothing was said yet.
    """
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    if os.environ.get("RANK", "0") == "0" and not store.check([key]):
        store.set(key, say())
    return store.get(key).decode()


def agreed_checkpoint(ckpt_path: str | None, directory: Path, find: Callable[[], Path | None]) -> Path | None:
    """The checkpoint that `ckpt_path` names: ``last`` means the same to all processes of a torchrun.

    Args:
        ckpt_path: What was given.
        directory: The run's directory.
        find: Finds it.
    """
    if ckpt_path != "last" or not _under_torchrun():
        return find()
    # A restarted group goes on from what the former one has saved since.
    key = f"gradpolicy/last/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{directory}"
    return Path(agreed(key, lambda: str(find())))


def _now() -> str:
    return datetime.now().strftime(STAMP)[:-3]


def _under_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _under_srun() -> bool:
    return int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_ID" in os.environ


OmegaConf.register_new_resolver("started", started, use_cache=True, replace=True)


@contextmanager
def claimed_directory(node: DictConfig, key: str) -> Iterator[Path]:
    """Makes the directory of a run or of a sweep, and removes it where it ends up empty.

    One that is named after the time belongs to one run: where it is taken already, the name gets a number at
    its end. All processes of one run share it, and a Slurm job that was requeued finds its own again.

    Args:
        node: The config node that names it, under ``dir``.
        key: The key of that, for messages.

    Raises:
        PolicyError: If it cannot be made or written to.
    """
    template = OmegaConf.to_container(node, resolve=False)["dir"]  # type: ignore[index, call-overload]
    wanted = Path(node.dir).absolute()
    check_writable(wanted, key)
    alone = any(word in str(template) for word in STAMPED) and not _under_srun()
    if not alone:
        with empty_directories_removed(wanted):
            yield wanted
        return
    with empty_directories_removed(wanted.parent):
        if _under_torchrun():
            directory = Path(agreed(f"{CLAIMED_KEY}/{wanted}", lambda: str(_taken(wanted))))
        else:
            directory = _taken(wanted) if is_first_rank() else wanted
        try:
            yield directory
        finally:
            if is_first_rank() and directory.is_dir() and not any(directory.iterdir()):
                directory.rmdir()


def _taken(wanted: Path) -> Path:
    """Makes a directory that was not there before: the one wanted, or one with a number added."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in count():
        directory = wanted.with_name(f"{wanted.name}-{number}") if number else wanted
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        return directory
    raise AssertionError


class RunDirectory:
    """A run's directory, and whether the run has begun to fill it.

    Args:
        path: The directory of what the run writes.
        made: Another that was made for this job, where the config has the run write elsewhere than Hydra.
    """

    def __init__(self, path: Path, made: Path | None = None) -> None:
        self.path = path
        self.begun = False
        self._new = [place for place in {path, made or path} if _holds_only_hydras(place)]

    def begin(self) -> None:
        """From here on the directory stays, whatever happens."""
        self.begun = True

    def remove_unless_begun(self) -> None:
        """Removes the directory if this run has put nothing into it that someone would miss."""
        if not self.begun and is_first_rank():
            for place in self._new:
                shutil.rmtree(place, ignore_errors=True)


def _holds_only_hydras(path: Path) -> bool:
    """Whether there is nothing but what Hydra puts into the directory of a job before it starts."""
    return os.path.isdir(path) and all(
        entry.name == ".hydra" or (entry.suffix == ".log" and not entry.stat().st_size)
        for entry in path.iterdir()
    )


@contextmanager
def run_directory(path: Path, made: Path | None = None) -> Iterator[RunDirectory]:
    """Removes the directory again if wrong input ends the run before it has begun.

    A directory that already held something, such as that of the run that is resumed, is left alone.
    """
    directory = RunDirectory(path, made)
    try:
        yield directory
    except wrong_input_errors():
        directory.remove_unless_begun()
        raise


def check_destinations(config: Mapping[str, Any]) -> None:
    """Makes sure that a run can write wherever its config tells it to.

    Args:
        config: The resolved config.

    Raises:
        PolicyError: For the first directory that cannot be made or written to, under its key.
    """
    places = {"paths.output_dir": config["paths"]["output_dir"]}
    places["trainer.default_root_dir"] = config["trainer"].get("default_root_dir")
    for group, argument in WRITTEN_TO.items():
        for name, node in (config.get(group) or {}).items():
            places[f"{group}.{name}.{argument}"] = (node or {}).get(argument)
            if str((node or {}).get("_target_")).startswith("gradpolicy."):
                places[f"{group}.{name}.directory"] = node.get("directory")
    for key, place in places.items():
        if isinstance(place, str) and "://" not in place:
            check_writable(Path(place).expanduser(), key)


def check_writable(path: Path, key: str) -> None:
    """Makes sure that a run can leave something in a directory, before it has trained for hours.

    The first rank looks. If all did, one would take away the directory in which another has a file.

    Args:
        path: The directory, which need not exist yet.
        key: The config key that names it.

    Raises:
        PolicyError: If it cannot be made or written to.
    """
    if not is_first_rank():
        return
    path = path.absolute()
    with empty_directories_removed(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise PolicyError(
                f"{key}: nothing can be written to {brief(str(path), most=120)}: {reason}"
            ) from error


@contextmanager
def empty_directories_removed(directory: Path) -> Iterator[None]:
    """Removes the directories that were made for a run, as far up as they were, where they end up empty."""
    # Of os.path, which says no where a name is too long for the file system.
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    try:
        yield
    finally:
        if is_first_rank():
            for path in missing:
                if os.path.isdir(path) and not any(path.iterdir()):
                    path.rmdir()
