"""Checkpoint files: read without running them, written whole or not at all, checked before use."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import lightning
import torch
from fsspec.utils import get_protocol
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from packaging.version import InvalidVersion, Version
from torch import Tensor, nn

from gradpolicy.checkpoint_file import (
    UnreadableError,
    check_file,
    check_kind,
    errors_named,
    load_file,
    save_file,
)
from gradpolicy.distributed.shard_reader import entries
from gradpolicy.distributed.sharded_checkpoint import (
    check_manifest,
    has_key,
    put_in_place,
    read_as_one,
    read_unsharded,
    saved_shapes,
)
from gradpolicy.errors import PolicyError, shortened, shown
from gradpolicy.tasks.task import Task
from gradpolicy.whole_file import written_whole

KEY = "ckpt_path"
WEIGHTS = "state_dict"
VERSION = "pytorch-lightning_version"
# The part of a run's config that its checkpoints hold, for a run that resumes from them.
SETTINGS = "gradpolicy_settings"
# The keys under which the saved state of a ModelCheckpoint holds paths.
PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
BY_INITIAL_WEIGHTS = "callbacks=[default,initial_weights] callbacks.initial_weights.path=…"
CANNOT_RESUME = f"a run cannot go on from it; begin a new one with its weights by {BY_INITIAL_WEIGHTS}"


# ---- reading


class Checked(NamedTuple):
    """The result of checking a checkpoint.

    Attributes:
        stamp: Sizes, times and inodes of its files. If it changes, the checkpoint was written again.
        infinite: The tensors that hold an infinite value, which a buffer may and a parameter may not.
    """

    stamp: tuple[Any, ...]
    infinite: tuple[str, ...]


# A checkpoint is checked once, however often a run reads it.
_checked: dict[Path, Checked] = {}


def check_checkpoint(path: Path, key: str = KEY) -> Checked:
    """Check that a checkpoint is undamaged, that nothing in it could run, and that no weight is NaN.

    A checkpoint that another program wrote has no checksums: a warning says so.

    Args:
        path: A file, or a directory of shards.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If it is damaged, could run something, or holds NaN.
    """
    with errors_named(path, key):
        stamp, known = _stamp(path), _checked.get(path.absolute())
        if known is not None and known.stamp == stamp:
            return known
        has_checksums = check_manifest(path) if path.is_dir() else check_file(path)
        content = read_unsharded(path) if path.is_dir() else load_file(path, mmap=True)
        _check_paths(content)
        # Shard by shard, since all of them together may not fit into memory.
        weights = entries(path, f"{WEIGHTS}.") if path.is_dir() else _weights(content).items()
        found = Checked(stamp, _infinite(weights))
    # Of what is refused, the refusal is all there is to say.
    if not has_checksums:
        rank_zero_warn(f"{path} was written without checksums: it cannot be told whether it is damaged")
    _checked[path.absolute()] = found
    return found


def read_checkpoint(path: Path, key: str = KEY) -> Mapping[str, Any]:
    """Return the content of a checkpoint; tensors stay in the file until they are used.

    Of a directory of shards, only what is not sharded is read. No code in a checkpoint is ever run.

    Args:
        path: The checkpoint.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If it is damaged, holds anything but tensors and plain values, or is no checkpoint of
            Lightning's.
    """
    check_checkpoint(path, key)
    with errors_named(path, key):
        return read_unsharded(path) if path.is_dir() else _with_weights(load_file(path, mmap=True))


def read_weights(path: Path, key: str = KEY) -> Mapping[str, Any]:
    """Return the weights of a checkpoint, be it a file or a directory of shards.

    Arguments and errors are those of :func:`read_checkpoint`.
    """
    check_checkpoint(path, key)
    with errors_named(path, key):
        return _with_weights(read_as_one(path) if path.is_dir() else load_file(path, mmap=True))[WEIGHTS]


def load_checkpoint(path: Path, map_location: Any = "cpu", *, mmap: bool = False) -> dict[str, Any]:
    """Return all of a checkpoint, as if one process had written it.

    A file of weights alone gets what Lightning needs to test it.

    Args:
        path: A file, or a directory of shards.
        map_location: As that of ``torch.load``.
        mmap: Leave tensors in the file until they are used; not for files that may be written to meanwhile.

    Raises:
        PolicyError: As :func:`read_checkpoint`.
    """
    check_checkpoint(path)
    with errors_named(path, KEY):
        content: Any = (
            read_as_one(path) if path.is_dir() else load_file(path, map_location=map_location, mmap=mmap)
        )
    return {VERSION: lightning.__version__, **content} if _weights(content) else content


def _weights(content: Any) -> Mapping[str, Any]:
    weights = content.get(WEIGHTS) if isinstance(content, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def _with_weights(content: Any) -> Mapping[str, Any]:
    if not isinstance(content, Mapping) or not isinstance(content.get(WEIGHTS), Mapping):
        raise UnreadableError(f"holds no {WEIGHTS!r} with tensors by name: it is no checkpoint of a run")
    return content


def _infinite(weights: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """Return the names of the tensors that hold infinite values.

    Raises:
        UnreadableError: If one holds NaN.
    """
    infinite: dict[str, None] = {}
    for key, value in weights:
        name = str(key).removeprefix(f"{WEIGHTS}.")
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.numel():
            extremes = _extremes(value.detach())
            if extremes.isnan().any():
                raise UnreadableError(f"holds NaN in {name[:120]}: no run can go on from it")
            if extremes.isinf().any():
                infinite[name] = None
    return tuple(infinite)


def _extremes(tensor: Tensor) -> Tensor:
    """Return the smallest and the largest number; both are NaN where any is."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    dense = real.to_dense() if real.layout is not torch.strided else real
    # aminmax does not take numbers of one byte.
    return torch.stack(torch.aminmax(dense.float() if dense.itemsize == 1 else dense))


def _check_paths(content: Any) -> None:
    """Refuse a checkpoint by which Lightning would delete files elsewhere.

    Lightning's ModelCheckpoint deletes the checkpoints that its saved state names as outdated: those below
    its own directory, but without following ``..``, and any whose path has a protocol, such as ``local://``.

    Raises:
        UnreadableError: If such a path is named.
    """
    states = content.get("callbacks") if isinstance(content, Mapping) else None
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


def _stamp(path: Path) -> tuple[Any, ...]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        check_kind(file, KEY)
    return tuple(
        (file.name, status.st_ino, status.st_size, status.st_mtime_ns)
        for file, status in ((file, file.stat()) for file in files)
    )


# ---- writing


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint under a temporary name, flushes it to the disk, then renames it.

    If a run is killed while it saves, or the disk fills up, the former checkpoint stays as it was; in the
    second case the error says so. When a checkpoint is read, it is compared with its checksum, and nothing in
    it is run. A directory that a sharding strategy wrote loads as if one process had written it. Remote paths
    (``s3://…``) are left to Lightning, which compares no checksums.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[WholeCheckpointIO()], logger=False)
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: What is saved, with ``torch.save``.
            path: Where it is saved.
            storage_options: Not for local files.

        Raises:
            OSError: If it could not be written, with the checkpoint that is left.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return a checkpoint; the directory of a sharded one as if one process had written it.

        Args:
            path: The checkpoint.
            map_location: As that of ``torch.load``.
            weights_only: Ignored: only tensors and plain values are ever read.

        Raises:
            FileNotFoundError: If there is none.
            PolicyError: If it is damaged, holds NaN weights, or holds anything that could run.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no checkpoint {path}")
        return load_checkpoint(Path(path), map_location)


def write_checkpoint(content: Any, path: Path) -> None:
    """Save with a checksum; the path holds the former content until all of the new content is there.

    Raises:
        OSError: If it could not be written, naming the newest checkpoint that is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # What a killed process was writing.
    for abandoned in path.parent.glob(".*.part"):
        abandoned.unlink(missing_ok=True)
    whole = path.with_name(f".{path.name}.whole") if path.is_dir() else path
    try:
        with written_whole(whole, "w+b") as file:
            save_file(content, file)
        if whole != path:
            put_in_place(whole, path)
    except (OSError, RuntimeError) as error:
        # torch.save reports a failed write as a RuntimeError whose context is the OSError.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        reason = os.strerror(cause.errno or 0)
        raise OSError(cause.errno, f"could not save {path}: {reason}; {_last_good(path)}") from error


def _last_good(path: Path) -> str:
    left = sorted(path.parent.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
    if not left:
        return "there is no former checkpoint"
    return f"the former {left[-1].name} is whole: make room and resume from it (ckpt_path=last)"


# ---- checks before use


def check_fits(path: Path, model: nn.Module, key: str = KEY) -> None:
    """Check that a checkpoint is of this model: the same names, the same shapes, no infinite parameters.

    Args:
        path: The checkpoint.
        model: The model.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If it is damaged, or of another model.
    """
    content = read_checkpoint(path, key)
    saved = saved_shapes(path) if path.is_dir() else _shapes(content[WEIGHTS])
    wanted = _shapes(model.state_dict())
    lacking, surplus = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    reshaped = [
        f"{name} is {saved[name]} there and {wanted[name]} here"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    differences = [
        *([f"it lacks {shortened(lacking)}"] if lacking else []),
        *([f"it holds {shortened(surplus)}, which this model has not"] if surplus else []),
        *reshaped[:2],
    ]
    if differences:
        raise PolicyError(f"{key}: {path} is of another model: {'; '.join(differences)}")
    infinite = {*check_checkpoint(path, key).infinite} & {name for name, _ in model.named_parameters()}
    if infinite:
        raise PolicyError(f"{key}: {path} holds infinite values in {shortened(sorted(infinite))}")


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def check_resumable(path: Path) -> None:
    """Check that a checkpoint holds what a run needs to resume, besides weights.

    Args:
        path: The checkpoint.

    Raises:
        PolicyError: If anything is missing, or is not what Lightning writes.
    """
    content = read_checkpoint(path)
    if path.is_dir() and has_key(path, "optimizer_0"):
        # The states of optimizers are among its shards.
        content = {"optimizer_states": [], **content}
    lacking = [name for name in RESUMED if name not in content]
    wrong = [name for name, is_right in RESUMED.items() if name in content and not is_right(content[name])]
    if lacking or wrong:
        what = f"holds no {' and no '.join(lacking)}" if lacking else f"holds {wrong[0]} of another kind"
        raise PolicyError(f"{KEY}: {path} {what}: {CANNOT_RESUME}")


def _is_version(value: Any) -> bool:
    try:
        return bool(Version(value))
    except (InvalidVersion, TypeError):
        return False


def _is_of_loops(value: Any) -> bool:
    fit = value.get("fit_loop") if isinstance(value, Mapping) else None
    # If one of these is absent, Lightning counts from zero again.
    parts = ("state_dict", "epoch_progress", "epoch_loop.batch_progress")
    return isinstance(fit, Mapping) and all(isinstance(fit.get(part), Mapping) for part in parts)


def _is_of_optimizers(value: Any) -> bool:
    return _are_mappings(value) and all(
        _are_mappings(state.get("param_groups")) and isinstance(state.get("state"), Mapping)
        for state in value
    )


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(state, Mapping) for state in value)


# What Lightning writes beside the weights and needs to resume, and a check of each value.
RESUMED: dict[str, Callable[[Any], bool]] = {
    "loops": _is_of_loops,
    "optimizer_states": _is_of_optimizers,
    "lr_schedulers": _are_mappings,
    VERSION: _is_version,
}


def check_optimizer(model: LightningModule, checkpoint: Path | None) -> None:
    """Make the optimizer once, and check that it can resume from a checkpoint.

    Args:
        model: The model. Only the optimizer of a :class:`~gradpolicy.tasks.task.Task` is checked: other
            modules may make theirs in any way.
        checkpoint: What the run is resumed from; None if it is not.

    Raises:
        PolicyError: For arguments that the optimizer refuses, or a checkpoint of another kind of optimizer.
    """
    if not isinstance(model, Task):
        return
    try:
        optimizer = model.make_optimizer(model.parameters())
    except (TypeError, ValueError) as error:
        raise PolicyError(f"optimizer: {error}") from error
    if checkpoint is not None:
        _check_options(optimizer, checkpoint)


def _check_options(optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Compare an optimizer's options with those in a checkpoint.

    Raises:
        PolicyError: If the checkpoint lacks one. If it is of another program, and so holds no settings of its
            run, also for the first that differs; not for one that a scheduler may have changed.
    """
    content = read_checkpoint(checkpoint)
    # In a directory they are among its shards.
    groups = [group for state in content.get("optimizer_states", ()) for group in state["param_groups"]]
    # This fills in options that newer versions of torch have added, as loading a state does.
    optimizer.__setstate__({"state": {}, "param_groups": [{**group, "params": []} for group in groups]})
    lacking = [name for name in optimizer.defaults for group in optimizer.param_groups if name not in group]
    if lacking:
        raise PolicyError(
            f"{KEY}: {checkpoint} was written with another optimizer than {type(optimizer).__name__}: "
            f"its state has no {shortened(list(dict.fromkeys(lacking)))}; resume with that run's optimizer; "
            f"under this one {CANNOT_RESUME}"
        )
    if SETTINGS in content:
        return
    for group in groups[:1]:
        began = {**group, "lr": group.get("initial_lr", group.get("lr"))}
        # A scheduler may have changed any option, and records what the rate was.
        names = ("initial_lr" in group) * ["lr"] if content.get("lr_schedulers") else list(optimizer.defaults)
        for name in names:
            here, there = _plain(optimizer.defaults[name]), _plain(began[name])
            if here != there:
                raise setting_differs(f"optimizer.{name}", shown(here), shown(there))


def setting_differs(key: str, here: str, there: str) -> PolicyError:
    """Return the error for a setting that a checkpoint decides and a config contradicts."""
    return PolicyError(
        f"{key}: {here} given, and the run that ckpt_path goes on with has {there}; leave it so; a new "
        f"run begins with the weights alone by {BY_INITIAL_WEIGHTS}"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
