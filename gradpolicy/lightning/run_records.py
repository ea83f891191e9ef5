"""What a run says of itself in its directory, and which of several runs is the newest."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RECORD = "run.json"
RUN, SWEEP, TRIAL = "run", "sweep", "trial"
KINDS = {RUN: "a run", SWEEP: "a job of a sweep", TRIAL: "a trial of a study"}
# As directories are named where nothing else is asked for.
STAMPED = re.compile(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)(?:-(\d{3,6}))?(?:-\d+)?$")


@dataclass(frozen=True)
class RunRecord:
    """What a run leaves in its directory for who looks for it later.

    Args:
        task: The config's ``task_name``.
        kind: ``"run"``, ``"sweep"`` for a job of a sweep, ``"trial"`` for a trial of a study.
        started: When it began to train or test, last time, in seconds since 1970.
        directory: Where it was. One that says another place is a copy, or was moved.
    """

    task: str
    kind: str
    started: float
    directory: str

    def save(self) -> None:
        """Writes it into the run's directory."""
        place = Path(self.directory) / RECORD
        part = place.with_name(f".{RECORD}.part")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(part, place)

    @staticmethod
    def load(directory: Path) -> "RunRecord | None":
        """Reads what :meth:`save` wrote; None where there is nothing that can be read."""
        try:
            said = json.loads((directory / RECORD).read_text())
            record = RunRecord(
                str(said["task"]), said["kind"], float(said["started"]), str(said["directory"])
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return record if record.kind in KINDS else None


def record_of(directory: Path, task: str, callbacks: dict[str, Any] | None, in_sweep: bool) -> RunRecord:
    """Describes a run that begins now.

    Args:
        directory: Its directory.
        task: The config's ``task_name``.
        callbacks: The config's callbacks; one of them tells that a study draws the values.
        in_sweep: Whether Hydra runs it as one job of several.
    """
    targets = [str((node or {}).get("_target_")) for node in (callbacks or {}).values()]
    kind = SWEEP if in_sweep or "WANDB_SWEEP_ID" in os.environ else RUN
    kind = TRIAL if any(target.endswith(".ReportToStudy") for target in targets) else kind
    return RunRecord(task, kind, datetime.now(UTC).timestamp(), str(directory.absolute()))


@dataclass(frozen=True)
class FoundRun:
    """A run that was found below a place.

    Args:
        directory: Its directory.
        kind: As :class:`RunRecord` has it.
        task: Its task; None where nothing tells.
        started: When it began; None where nothing tells.
        original: False for one that lies elsewhere than where it was run.
        touched: The newest file time of its checkpoints.
    """

    directory: Path
    kind: str
    task: str | None
    started: float | None
    original: bool
    touched: float

    @property
    def age(self) -> tuple[bool, float, bool, float]:
        """Sorts by when the run began. File times tell only where nothing else does: copying changes them."""
        return self.started is not None, self.started or 0.0, self.original, self.touched


def is_run_directory(directory: Path) -> bool:
    """Whether a run wrote into this directory."""
    return any((directory / name).exists() for name in (RECORD, "config.yaml", ".hydra"))


def runs_newest_first(place: Path, checkpoints: Iterable[Path]) -> list[FoundRun]:
    """Lists the runs below a place: those that left a record, and those that the checkpoints are of."""
    touched = {path.parent: 0.0 for path in place.rglob(RECORD)}
    for path in checkpoints:
        run = _run_of(path, place)
        touched[run] = max(touched.get(run, 0.0), path.stat().st_mtime)
    found = [_look_at(directory, place, time) for directory, time in touched.items()]
    return sorted(found, key=lambda run: run.age, reverse=True)


def _run_of(checkpoint: Path, place: Path) -> Path:
    """The run's directory that a checkpoint lies in."""
    for above in _up_to(checkpoint.parent, place):
        if is_run_directory(above):
            return above
    above = checkpoint.parent.parent
    inside = above == place or place in above.parents
    return above if inside and checkpoint.parent.name == "checkpoints" else checkpoint.parent


def _up_to(directory: Path, place: Path) -> Iterator[Path]:
    while directory != place and place in directory.parents:
        yield directory
        directory = directory.parent


def _look_at(directory: Path, place: Path, touched: float) -> FoundRun:
    record = RunRecord.load(directory)
    if record is not None:
        original = os.path.realpath(record.directory) == os.path.realpath(directory)
        return FoundRun(directory, record.kind, record.task, record.started, original, touched)
    # A run of before there were records: its place and its name tell.
    parts = directory.relative_to(place).parts
    kind = SWEEP if "sweeps" in parts else TRIAL if _tells_a_study(directory) else RUN
    task = directory.parent.parent.name if directory.parent.name in ("runs", "sweeps") else None
    return FoundRun(directory, kind, task, _stamp(directory.name), True, touched)


def _tells_a_study(directory: Path) -> bool:
    config = directory / "config.yaml"
    return config.is_file() and "gradpolicy.lightning.optuna_pruning.ReportToStudy" in config.read_text(
        errors="ignore"
    )


def _stamp(name: str) -> float | None:
    """The moment that a directory is named after; None where it is not.

    Example:
        >>> _stamp("2026-01-01_10-00-00-250-1") - _stamp("2026-01-01_10-00-00")
        0.25
    """
    found = STAMPED.match(name)
    if found is None:
        return None
    try:
        moment = datetime.strptime(found[1], "%Y-%m-%d_%H-%M-%S")
    except ValueError:
        return None
    return moment.timestamp() + float(f"0.{found[2] or 0}")


def brief_path(path: Path, most: int = 120) -> str:
    """A path as a message quotes it: the beginning of one that is too long to read."""
    return str(path) if len(str(path)) <= most else f"{str(path)[: most - 1]}…"
