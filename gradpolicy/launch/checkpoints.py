"""Finds the checkpoint to resume from or to test, and makes sure that it is whole and of this model."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from packaging.version import InvalidVersion, Version
from torch import Tensor, nn

from gradpolicy.distributed.sharded_checkpoint import (
    find_whole,
    holds,
    is_sharded_checkpoint,
    is_whole,
    saved_shapes,
)
from gradpolicy.errors import PolicyError, nearest, shortened
from gradpolicy.faults.reading import KEY, VERSION, WEIGHTS, check_checkpoint, read_checkpoint, read_weights

__all__ = ["KEY", "check_fits", "check_resumable", "find_checkpoint", "read_checkpoint", "read_weights"]

CANNOT_RESUME = (
    "a run cannot go on from it; begin a new one with its weights by callbacks=[default,initial_weights] "
    "callbacks.initial_weights.path=…"
)
LAST = "last"
LAST_NAME = "last*.ckpt"


def find_checkpoint(ckpt_path: str | None, places: Iterable[Path]) -> Path | None:
    """Finds the checkpoint that `ckpt_path` names.

    Args:
        ckpt_path: None; a file; a run directory, which means the newest good one in it; or ``last``, which
            means the newest good one of all runs in the given places.
        places: Directories to look for ``last`` in; the first one that holds any decides.

    Raises:
        PolicyError: If there is none.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == LAST:
        places = list(places)
        for place in places:
            found = _newest_good(place, LAST_NAME)
            if found is not None:
                return found
        raise PolicyError(f"ckpt_path=last: no good checkpoint below {', '.join(map(str, places))}")
    path = Path(ckpt_path).expanduser()
    if path.is_dir() and not is_sharded_checkpoint(path):
        found = _newest_good(path, "*.ckpt")
        if found is None:
            raise PolicyError(f"ckpt_path: no good checkpoint in the directory {path}")
        return found
    if not path.exists():
        raise PolicyError(f"ckpt_path: {path} does not exist; {_near(path)}")
    return path


def check_fits(path: Path, model: nn.Module, key: str = KEY) -> None:
    """Checks that a checkpoint is of this model: the same names, the same shapes, no infinite parameters.

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


def check_resumable(path: Path, key: str = KEY) -> None:
    """Checks that a checkpoint holds what a run needs to go on, besides weights.

    Args:
        path: The checkpoint.
        key: The config key that names it, for the message.

    Raises:
        PolicyError: If anything is lacking, or of another kind than Lightning writes.
    """
    content = read_checkpoint(path, key)
    if path.is_dir() and holds(path, "optimizer_0"):
        # The states of optimizers are among its shards.
        content = {"optimizer_states": [], **content}
    lacking = [name for name in RESUMED if name not in content]
    wrong = [name for name, is_right in RESUMED.items() if name in content and not is_right(content[name])]
    if lacking or wrong:
        what = f"holds no {' and no '.join(lacking)}" if lacking else f"holds {wrong[0]} of another kind"
        raise PolicyError(f"{key}: {path} {what}: {CANNOT_RESUME}")


def _is_version(value: Any) -> bool:
    try:
        return bool(Version(value))
    except (InvalidVersion, TypeError):
        return False


def _is_of_loops(value: Any) -> bool:
    fit = value.get("fit_loop") if isinstance(value, Mapping) else None
    # Lightning would begin to count anew where one of these is absent.
    parts = ("state_dict", "epoch_progress", "epoch_loop.batch_progress")
    return isinstance(fit, Mapping) and all(isinstance(fit.get(part), Mapping) for part in parts)


def _is_of_optimizers(value: Any) -> bool:
    return _is_of_schedulers(value) and all(
        _is_of_schedulers(state.get("param_groups")) and isinstance(state.get("state"), Mapping)
        for state in value
    )


def _is_of_schedulers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(state, Mapping) for state in value)


# What Lightning writes beside the weights and needs to go on, and whether a value can be that.
RESUMED: dict[str, Callable[[Any], bool]] = {
    "loops": _is_of_loops,
    "optimizer_states": _is_of_optimizers,
    "lr_schedulers": _is_of_schedulers,
    VERSION: _is_version,
}


def _newest_good(place: Path, name: str) -> Path | None:
    """The newest checkpoint below a place that can be read: a file, or a directory of shards."""
    found = {*place.rglob(name), *find_whole(place, name)}
    for path in sorted(found, key=lambda each: each.stat().st_mtime, reverse=True):
        try:
            if path.is_dir() and not is_whole(path):
                raise PolicyError(f"ckpt_path: {path} was not finished")
            read_checkpoint(path)
        except PolicyError as error:
            rank_zero_warn(f"passed over: {error}")
            if name != LAST_NAME:
                continue
            # Rather another checkpoint of the same run than one of another run.
            beside = _newest_good(path.parent, "*.ckpt")
            if beside is None:
                continue
            return beside
        return path
    return None


def _near(path: Path) -> str:
    """Names the checkpoints beside the one that does not exist."""
    if not path.parent.is_dir():
        return f"there is no directory {path.parent} either; ckpt_path=last finds the newest"
    found = [candidate.name for candidate in path.parent.glob("*.ckpt")]
    return nearest(path.name, found, count=2) or "ckpt_path=last finds the newest"


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
