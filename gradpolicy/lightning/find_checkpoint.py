"""Finds the checkpoint to resume from or to test, and makes sure that it is whole and of this model."""

import os
from collections import Counter
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
from gradpolicy.lightning.checkpoint_reading import (
    KEY,
    VERSION,
    WEIGHTS,
    check_checkpoint,
    read_checkpoint,
    read_weights,
)
from gradpolicy.lightning.run_records import (
    KINDS,
    RUN,
    FoundRun,
    brief_path,
    is_run_directory,
    runs_newest_first,
)

__all__ = ["KEY", "check_fits", "check_resumable", "find_checkpoint", "read_checkpoint", "read_weights"]

CANNOT_RESUME = (
    "a run cannot go on from it; begin a new one with its weights by callbacks=[default,initial_weights] "
    "callbacks.initial_weights.path=…"
)
LAST = "last"
LAST_NAME = "last*.ckpt"


def find_checkpoint(ckpt_path: str | None, places: Iterable[Path], task: str | None = None) -> Path | None:
    """Finds the checkpoint that `ckpt_path` names.

    Args:
        ckpt_path: None; a file; a run directory, which means the newest good one in it; or ``last``, which
            means the newest good one of the newest run in the given places. Jobs of sweeps and trials of
            studies are no runs that `last` takes, unless a place is such a job's own directory.
        places: Where to look for ``last``: directories of single runs, then the one that holds all runs. The
            first one that holds any decides.
        task: The ``task_name`` of the runs that `last` takes; None: any.

    Raises:
        PolicyError: If there is none.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == LAST:
        return _last_of(list(places), task)
    path = Path(ckpt_path).expanduser()
    # Of os.path, which says no where a name is too long for the file system.
    if os.path.isdir(path) and not is_sharded_checkpoint(path):
        found, bad = _newest_good(_checkpoints_of_run(path))
        _warn_of(bad)
        if found is None:
            raise PolicyError(f"ckpt_path: no good checkpoint in the directory {brief_path(path)}")
        return found
    if not os.path.exists(path):
        raise PolicyError(f"ckpt_path: {brief_path(path)} does not exist; {_near(path)}")
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


def _last_of(places: list[Path], task: str | None) -> Path:
    passed: list[str] = []
    tried: set[Path] = set()
    for place in places:
        for run in _in_order(place, is_own=place != places[-1]):
            if run.directory in tried:
                continue
            tried.add(run.directory)
            if run.kind != RUN or (task is not None and run.task not in (task, None)):
                passed.append(KINDS[run.kind] if run.kind != RUN else f"a run of task {run.task!r}")
                continue
            found, bad = _newest_good(_named(run.directory, LAST_NAME))
            if found is None and bad:
                # Rather another checkpoint of the same run than one of another run.
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
    raise PolicyError(f"ckpt_path=last: no good checkpoint below {', '.join(map(str, places))}{hint}")


def _in_order(place: Path, is_own: bool) -> list[FoundRun]:
    """The runs below a place, the newest first; the directory of the run itself is one run."""
    checkpoints = _named(place, LAST_NAME)
    if not is_own:
        return runs_newest_first(place, checkpoints)
    return [FoundRun(place, RUN, None, None, True, 0.0)] if checkpoints else []


def _named(place: Path, name: str) -> set[Path]:
    return {*place.rglob(name), *find_whole(place, name)}


def _checkpoints_of_run(directory: Path) -> set[Path]:
    """The checkpoints in a run directory. Below a directory that holds no run, only near the top."""
    if is_run_directory(directory):
        return _named(directory, "*.ckpt")
    near = (directory, *(path for path in directory.glob("*") if os.path.isdir(path)))
    return {path for place in near for path in place.glob("*.ckpt")}


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
        return f"there is no directory {brief_path(path.parent)} either; ckpt_path=last finds the newest"
    found = [candidate.name for candidate in path.parent.glob("*.ckpt")]
    return nearest(path.name, found, count=2) or "ckpt_path=last finds the newest"


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
