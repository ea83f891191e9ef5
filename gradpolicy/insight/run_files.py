"""The JSON files of a run directory: names, and models of their content.

``plan.json`` holds a :class:`gradpolicy.planning.plan_table.Plan`, ``run.json`` a
:class:`gradpolicy.train.lightning.runs.RunRecord`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from gradpolicy.errors import PolicyError
from gradpolicy.files import read_json, write_json

PLAN, PLAN_TEXT, RESULT, AUDIT, REPORT = "plan.json", "plan.txt", "result.json", "audit.json", "report.html"
STOPPED = "stopped before its end"

# A float represents integers up to this one exactly.
Count = Annotated[int, Field(ge=0, le=2**53)]


class AuditFile(BaseModel):
    """The content of ``audit.json``, also part of checkpoints.

    Attributes:
        intervals: The number of intervals over which frozen entries of a tensor were compared.
        entries: The number of frozen entries in them.
        changed: The number of these that changed.
        sampled: True if random entries of a tensor were compared, False if all were.
        differences: A sentence for each tensor with changed entries.
    """

    intervals: Count
    entries: Count
    changed: Count
    sampled: bool
    differences: list[str] = []


@dataclass(frozen=True)
class Result:
    """The result of a run, the content of ``result.json``.

    Args:
        overrides: The overrides of the command line.
        metrics: The last value of each metric.
        optimized: The value that a sweep compares.
        status: ``"completed"``, ``"planned"``, ``"failed"``, or ``"stopped"`` if a signal or Ctrl-C ended it.
        error: The error, if it failed.
        directory: The run directory.
        program: The command that started the run.
        seconds: The duration.
    """

    overrides: list[str]
    metrics: dict[str, float] = field(default_factory=dict)
    optimized: float | None = None
    status: str = "completed"
    error: str = ""
    directory: str = ""
    program: str = "python train.py"
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))

    @staticmethod
    def load(path: Path) -> "Result":
        """Read a result that :meth:`save` wrote.

        Raises:
            PolicyError: If it is missing, damaged, or another file.
        """
        try:
            return read_json(path, Result)
        except (OSError, ValueError) as error:
            raise PolicyError(f"{path} cannot be read: {error}") from error


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return a nested config as values by dotted key.

    Example:
        >>> flat({"a": {"b": 1}, "c": [1, 2]})
        {'a.b': 1, 'c': [1, 2]}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found
