"""Checkpoint files: read without running code, written completely or not at all, checked before use."""

import glob
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

import lightning
import torch
from fsspec.utils import get_protocol
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from gradpolicy.errors import PolicyError, brief, shortened
from gradpolicy.files import atomic_open
from gradpolicy.tensors.checkpoint_file import (
    UnreadableError,
    check_file,
    could_not_save,
    errors_named,
    form_of,
    load_file,
)
from gradpolicy.tensors.sharding import bounds
from gradpolicy.train.lightning.trainer_parts import callbacks_of
from gradpolicy.train.training_run import Driven

KEY = "ckpt_path"
WEIGHTS = "state_dict"
VERSION = "pytorch-lightning_version"
# The keys under which the saved state of a ModelCheckpoint holds paths.
PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
BY_INITIAL_WEIGHTS = "callbacks=[default,initial_weights] callbacks.initial_weights.path=…"
# The parts that hold a state for each optimizer, or for each scheduler.
COUNTED = ("optimizer_states", "lr_schedulers")
# The parts that Lightning writes in addition to weights. Without one of them it would start at zero.
RESUMED = (*COUNTED, "loops", "global_step")
# Optimizer.__setstate__ adds this default, which some optimizers, such as Muon, do not have.
ADDED_DEFAULT = "differentiable"
CANNOT_RESUME = f"a run cannot be resumed from it; start a new one with its weights by {BY_INITIAL_WEIGHTS}"
IS_DIRECTORY = (
    "is a directory, and a checkpoint is a file; python -m torch.distributed.checkpoint.format_utils "
    "dcp_to_torch DIRECTORY FILE makes one with the weights of a directory of shards, if you trust it: it "
    "unpickles"
)


# ---- reading


def check_checkpoint(path: Path, key: str = KEY) -> None:
    """Check that a checkpoint is undamaged, contains no code, and has no NaN weights.

    A checkpoint is checked once, even if a run reads it several times. One that another program wrote may
    have no checksums, of which a warning is given.

    Args:
        path: The checkpoint.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If it is damaged, contains code, is not a Lightning checkpoint, or has NaN weights.
    """
    with errors_named(path, key):
        if path.is_dir():
            raise UnreadableError(IS_DIRECTORY)
        status = path.stat()
        _check(path.absolute(), (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache
def _check(path: Path, stamp: object) -> None:
    """Check a checkpoint. The arguments of the cache include its inode, size and time."""
    has_checksums = check_file(path)
    content = load_file(path, mmap=True)
    if not isinstance(content, Mapping) or not isinstance(content.get(WEIGHTS), Mapping):
        raise UnreadableError(f"holds no {WEIGHTS!r} with tensors by name: it is no checkpoint of a run")
    _check_paths(content)
    for key, value in content[WEIGHTS].items():
        is_number = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        if is_number and value.numel() and bounds(value).isnan().any():
            raise UnreadableError(f"holds NaN in {str(key)[:120]}: no run can go on from it")
    # If the checkpoint is refused, no other message is needed.
    if not has_checksums:
        rank_zero_warn(f"{path} was written without checksums: it cannot be told whether it is damaged")


def read_checkpoint(
    path: Path, key: str = KEY, *, map_location: Any = "cpu", mmap: bool = True
) -> dict[str, Any]:
    """Return the content of a checkpoint. No code in it is run.

    Args:
        path: The checkpoint.
        key: The config key that names it, for the message.
        map_location: As for ``torch.load``.
        mmap: Map tensors into memory; not for files that may be overwritten meanwhile.

    Raises:
        PolicyError: If it is damaged, contains anything but tensors and plain values, or is not a Lightning
            checkpoint.
    """
    check_checkpoint(path, key)
    with errors_named(path, key):
        content = load_file(path, map_location=map_location, mmap=mmap)
    # Lightning needs these keys to test a file with weights alone.
    return {VERSION: lightning.__version__, **content}


def _check_paths(content: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that would make Lightning delete files outside its directory.

    Lightning's ModelCheckpoint deletes outdated checkpoints named in its saved state: those below its own
    directory, without resolving ``..``, and any path with a protocol, such as ``local://``.

    Raises:
        UnreadableError: If it names such a path.
    """
    states = content.get("callbacks")
    for state in states.values() if isinstance(states, Mapping) else ():
        if not isinstance(state, Mapping):
            continue
        best = state.get("best_k_models")
        for named in (*map(state.get, PATHS), *(best if isinstance(best, Mapping) else ())):
            if isinstance(named, str) and (get_protocol(named) != "file" or ".." in PurePath(named).parts):
                raise UnreadableError(
                    f"names {named[:120]!r} as a checkpoint of its run, which training would delete;"
                    " its weights alone can be used: callbacks.initial_weights.path"
                )


# ---- writing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint under a temporary name, syncs it to the disk, then renames it.

    If the run is killed while saving, or the disk is full, the previous checkpoint is unchanged; in the
    second case the error says so. When a checkpoint is read, its checksum is compared, and no code in it is
    run. Lightning handles remote paths (``s3://…``), without checksums.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[AtomicCheckpointIO()], logger=False)
    """

    # Called with the path of each checkpoint before it is written: a run that is killed then finds it again.
    list_checkpoint: Callable[[Path], None] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: The content, for ``torch.save``.
            path: The path.
            storage_options: Not for local files.

        Raises:
            OSError: If it could not be written; the message names the remaining checkpoint.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if self.list_checkpoint is not None:
            self.list_checkpoint(Path(path))
        write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return a checkpoint.

        Args:
            path: The checkpoint.
            map_location: As for ``torch.load``.
            weights_only: Ignored: only tensors and plain values are ever read.

        Raises:
            FileNotFoundError: If there is none.
            PolicyError: If it is damaged, has NaN weights, or contains code.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no checkpoint {path}")
        return read_checkpoint(Path(path), map_location=map_location, mmap=False)


def write_checkpoint(content: Any, path: Path) -> None:
    """Save with a checksum; the path has the old content until the new content is complete.

    Raises:
        OSError: If it could not be written; the message names the newest remaining checkpoint.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Incomplete files of killed processes, not those that other runs write to the same directory.
    for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if abandoned.name.split(".")[-2].isdigit():
            abandoned.unlink(missing_ok=True)
    try:
        with atomic_open(path, "w+b") as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:
        raise could_not_save(path, error) from error


# ---- checks before use


def load_weights(path: Path, model: nn.Module, key: str = KEY) -> None:
    """Load the weights of a checkpoint into a model.

    Args:
        path: The checkpoint.
        model: The model.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If it is damaged, of another model, or has infinite parameters.
    """
    weights = read_checkpoint(path, key)[WEIGHTS]
    # Torch would cast whole and complex numbers to the model's.
    forms = {name: form_of(value) for name, value in weights.items() if isinstance(value, Tensor)}
    here = {name: form_of(value) for name, value in model.state_dict().items() if name in forms}
    others = [
        f"{name} is {forms[name]} there and {form} here" for name, form in here.items() if form != forms[name]
    ]
    try:
        if others:
            raise RuntimeError("; ".join(others[:2]))
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise PolicyError(f"{key}: {path} is of another model: {brief(str(error), most=400)}") from error
    infinite = [name for name, parameter in model.named_parameters() if bool(parameter.isinf().any())]
    if infinite:
        raise PolicyError(f"{key}: {path} holds infinite values in {shortened(infinite)}")


def check_resumable(path: Path) -> None:
    """Check that a checkpoint contains everything besides weights that a run needs in order to resume.

    Args:
        path: The checkpoint.

    Raises:
        PolicyError: If anything is missing.
    """
    content = read_checkpoint(path)
    lacking = [part for part in RESUMED if part not in content]
    if lacking:
        raise PolicyError(f"{KEY}: {path} holds no {' and no '.join(lacking)}: {CANNOT_RESUME}")


@contextmanager
def checked_restore(trainer: Trainer, checkpoint: Path | None) -> Iterator[None]:
    """Check a checkpoint before Lightning restores it, and name it if Lightning cannot restore it.

    This is done here, since not every strategy reads checkpoints through the trainer's plugin.

    Raises:
        PolicyError: In place of errors that are raised before training or testing begins.
    """
    if checkpoint is not None:
        check_checkpoint(checkpoint)
    try:
        yield
    except Exception as error:
        callbacks = callbacks_of(trainer, Callback)
        restoring = checkpoint is not None and any(getattr(each, "restoring", False) for each in callbacks)
        if not restoring or isinstance(error, MisconfigurationException):
            raise
        if isinstance(error, PolicyError):
            # Before the policies are installed it is not about the checkpoint.
            installed = any(isinstance(each, Driven) and each.run.freezer.all_policies for each in callbacks)
            if not installed or str(checkpoint) in str(error):
                raise
            raise PolicyError(f"{KEY}: {checkpoint}: {error}") from error
        kind = "it lacks" if isinstance(error, KeyError) else f"{type(error).__name__}:"
        what = brief(f"{kind} {error}", most=120)
        raise PolicyError(
            f"{KEY}: {checkpoint} holds a state of another kind ({what}): {CANNOT_RESUME}"
        ) from error


def counts_of(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of saved states of optimizers and of schedulers, unless they are in shards."""
    return {name: len(checkpoint[name]) for name in COUNTED if name in checkpoint}


def check_optimizers(trainer: Trainer, counts: Mapping[str, int]) -> None:
    """Check that the optimizers and schedulers of a run are those of the checkpoint that it has loaded.

    Lightning restores as many states as there are and ignores the rest.

    Args:
        trainer: The trainer.
        counts: The numbers of saved states, from :func:`counts_of`.

    Raises:
        PolicyError: If there is another number of them, or an optimizer of another class.
    """
    needed = (len(trainer.optimizers), len(trainer.lr_scheduler_configs))
    for name, number in zip(COUNTED, needed, strict=True):
        if counts.get(name, number) != number:
            raise PolicyError(
                f"{KEY}: {trainer.ckpt_path} holds {counts[name]} {name}, and this run needs {number}:"
                f" {CANNOT_RESUME}"
            )
    for optimizer in trainer.optimizers:
        # DeepSpeed's optimizer has no defaults, and checks this by itself.
        settings = getattr(optimizer, "defaults", {}).keys() - {ADDED_DEFAULT}
        lacking = settings - optimizer.param_groups[0].keys()
        if lacking:
            raise PolicyError(
                f"{KEY}: {trainer.ckpt_path} is of another optimizer than this run's, which needs"
                f" {shortened(sorted(lacking))}: {CANNOT_RESUME}"
            )
