"""The record that a run leaves in its directory, by which it is found later."""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from gradpolicy.json_file import read_json

RECORD = "run.json"
Kind = Literal["run", "sweep", "trial"]
RUN: Kind = "run"
SWEEP: Kind = "sweep"
TRIAL: Kind = "trial"
# A moment of the year 3058, which every calendar knows.
LAST_MOMENT = 2**35
PACKAGES = ("torch", "lightning", "numpy", "hydra-core")
KINDS: dict[Kind, str] = {RUN: "a run", SWEEP: "a job of a sweep", TRIAL: "a trial of a study"}


@dataclass(frozen=True)
class RunRecord:
    """What a run is, and when it began.

    Args:
        task: The config's ``task_name``.
        kind: ``"run"``, ``"sweep"`` for a job of a sweep, ``"trial"`` for a trial of a study.
        started: When it last began to train or test, in seconds since 1970.
        directory: Where it was written. A copy of the run still names the original directory.
        versions: Versions of Python and of the packages that decide results.
    """

    task: str
    kind: Kind
    started: Annotated[float, Field(ge=0, le=LAST_MOMENT)]
    directory: str
    versions: dict[str, str] = field(default_factory=dict)

    def save(self) -> None:
        """Writes it into the run's directory."""
        place = Path(self.directory) / RECORD
        part = place.with_name(f".{RECORD}.part")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(part, place)

    @staticmethod
    def load(directory: Path) -> "RunRecord | None":
        """Reads what :meth:`save` wrote; None if it is absent or cannot be read."""
        try:
            return read_json(directory / RECORD, RunRecord)
        except (OSError, ValueError):
            return None


def record_of(directory: Path, task: str, callbacks: dict[str, Any] | None, in_sweep: bool) -> RunRecord:
    """Describes a run that begins now.

    Args:
        directory: Its directory.
        task: The config's ``task_name``.
        callbacks: The config's callbacks; `PruneTrial` is among those of a trial.
        in_sweep: Whether Hydra runs it as one job of several.
    """
    targets = [str((node or {}).get("_target_")) for node in (callbacks or {}).values()]
    kind: Kind = SWEEP if in_sweep or "WANDB_SWEEP_ID" in os.environ else RUN
    kind = TRIAL if any(target.endswith(".PruneTrial") for target in targets) else kind
    versions = {
        "gradpolicy": sys.modules["gradpolicy"].__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }
    return RunRecord(task, kind, datetime.now(UTC).timestamp(), str(directory.absolute()), versions)
