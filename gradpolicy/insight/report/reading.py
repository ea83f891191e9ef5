"""Reads a run directory; a file that is absent or damaged is named, not an error."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import yaml
from pydantic import BaseModel

from gradpolicy.errors import brief
from gradpolicy.insight import record
from gradpolicy.insight.run_files import AuditFile, PlanFile, Result, flat
from gradpolicy.json_file import read_json
from gradpolicy.lightning.runs import RunRecord

Content = TypeVar("Content")

# Keys that differ between any two runs.
BOOKKEEPING = ("paths.", "hydra.", "logger.", "extras.", "ckpt_path", "tags", "task_name", "callbacks.study.")
# Overrides that a search adds to the command line of each trial.
ADDED = ("+callbacks.study=", "hydra.run.dir=")
WARNING = re.compile(r"\bwarning: (.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """The content of a run directory.

    Args:
        directory: The run directory.
        name: The name of the run in the report.
        config: The resolved config, flat: value by dotted key.
        defaults: The config without overrides, flat; empty if it was not saved.
        overrides: The overrides of the command line.
        plan: ``plan.json``.
        result: ``result.json``.
        metrics: The curves: a row for each logged step, a column for each metric.
        record: The record: a row for each line of ``record.jsonl``.
        audit: ``audit.json``.
        started: When the run began, as a person writes it.
        warnings: The warnings of the plan and of the log, each once.
        versions: The versions of the libraries.
        pictures: Attribution pictures.
        masks: Mask pictures: by weight, then ``mask`` and ``age``.
        missing: By file: why it is missing, and the part of the report that it would give.
    """

    directory: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    metrics: pd.DataFrame = field(default_factory=pd.DataFrame)
    record: pd.DataFrame = field(default_factory=pd.DataFrame)
    audit: Mapping[str, Any] = field(default_factory=dict)
    started: str = ""
    warnings: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    pictures: tuple[Path, ...] = ()
    masks: Mapping[str, Mapping[str, list[Path]]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def final_metrics(self) -> Mapping[str, float]:
        """The last value of each metric: of the result, or of the curves if the run did not end."""
        if self.result.get("metrics"):
            return {name: float(value) for name, value in self.result["metrics"].items()}
        numbers = self.metrics.drop(columns=["step", "epoch"], errors="ignore")
        return {
            str(name): float(column.dropna().iloc[-1])
            for name, column in numbers.items()
            if column.notna().any()
        }

    @property
    def status(self) -> str:
        """How the run ended."""
        return str(self.result.get("status", "not finished")) if self.result else "not finished"

    @property
    def broken_off(self) -> bool:
        """True if the run is known not to be completed; without a config that is not known."""
        return self.status in ("failed", "stopped") or (bool(self.config) and not self.result)

    @property
    def last_step(self) -> int:
        """The last step that was recorded or logged; 0 if none was."""
        tables = (table["step"] for table in (self.record, self.metrics) if "step" in table)
        steps = [pd.to_numeric(each, errors="coerce").max() for each in tables]
        return int(max((step for step in steps if step == step), default=0))

    @property
    def seed(self) -> Any:
        """The seed, if it is known."""
        return self.config.get("seed")

    @property
    def command(self) -> str:
        """The command that repeats the run, without overrides that a search added."""
        program = self.result.get("program", "python train.py")
        default = f"optimized_metric={self.defaults.get('optimized_metric')}"
        words = [
            word for word in self.overrides if not word.startswith(ADDED) and word.replace("'", "") != default
        ]
        return f"{program} {shlex.join(words)}".rstrip()

    def rows(self, kind: str) -> pd.DataFrame:
        """Return the rows of one kind in the record, by step; without any, no columns either."""
        if "kind" not in self.record:
            return pd.DataFrame()
        found = self.record[self.record["kind"] == kind]
        return pd.DataFrame() if found.empty else found.sort_values("step", kind="stable")


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read runs, each once, named by as many parts of their directories as tell them apart."""
    directories = list(dict.fromkeys(directories))
    parts = 1
    while len({path.parts[-parts:] for path in directories}) < len(directories):
        parts += 1
    return [read_run(path, "/".join(path.parts[-parts:])) for path in directories]


def read_run(directory: Path, name: str | None = None) -> Run:
    """Read a run directory.

    Args:
        directory: The run directory.
        name: The name of the run in the report; None: that of its directory.
    """
    files = _Files(directory)
    config = files.read("config.yaml", "what was asked", _read_config) or {}
    defaults = files.read("defaults.yaml", "how the config differs from the defaults", _read_config) or {}
    plan = files.read_model("plan.json", "the plan and the map of the gradient", PlanFile)
    audit = files.read_model("audit.json", "the proof", AuditFile)
    result = files.read_model("result.json", "final results; the run did not end well", Result)
    log = files.read("train.log", "warnings given during training", _read_text) or ""
    recorded = files.read(
        "record.jsonl", "the timeline of masks, gradient norms, memory and ages", _read_record
    )
    curves = sorted(directory.glob("csv/*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    metrics_file = str(curves[-1].relative_to(directory)) if curves else "csv/*/metrics.csv"
    metrics = files.read(metrics_file, "curves", _read_curves)
    run = files.read_model("run.json", "when it began", RunRecord)
    overrides = result.get("overrides") or files.read(".hydra/overrides.yaml", "the command", _read_list)
    warnings = [*plan.get("warnings", ()), *(match[1] for match in WARNING.finditer(log))]
    return Run(
        directory=directory,
        name=name or directory.name,
        config=config,
        defaults=defaults,
        overrides=tuple(map(str, overrides or ())),
        plan=plan,
        result=result,
        metrics=pd.DataFrame() if metrics is None else metrics,
        record=pd.DataFrame() if recorded is None else recorded,
        audit=audit,
        started=_moment(run.get("started")),
        warnings=tuple(dict.fromkeys(map(str, warnings))),
        versions={**(audit.get("versions") or {}), **(run.get("versions") or {})},
        pictures=tuple(sorted((directory / "pictures").glob("*.png"))),
        masks=_mask_pictures(directory / "masks"),
        missing=files.missing,
    )


class _Files:
    """Files of a directory, with a note of those that cannot be read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.missing: dict[str, str] = {}

    def read(self, name: str, purpose: str, reader: Callable[[Path], Content]) -> Content | None:
        """Return the content of a file; None if it is absent or damaged."""
        path = self.directory / name
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is no regular file")
            return reader(path)
        except FileNotFoundError:
            self.missing[name] = f"is absent, and with it {purpose}"
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            reason = brief(" ".join(str(error).split()).replace(f"{path}, ", ""), most=160)
            self.missing[name] = f"cannot be read ({reason}), and with it {purpose} is missing"
        return None

    def read_model(self, name: str, purpose: str, model: type[Any]) -> dict[str, Any]:
        """Return the content of a JSON file as plain values; empty if it is absent or damaged."""
        found = self.read(name, purpose, lambda path: read_json(path, model))
        if found is None:
            return {}
        return found.model_dump(exclude_unset=True) if isinstance(found, BaseModel) else asdict(found)


def is_bookkeeping(key: str) -> bool:
    """Return True if a key says where a run is kept, and not what it does."""
    return key.startswith(BOOKKEEPING)


def _read_config(path: Path) -> dict[str, Any]:
    """Return a config, flat, with the run's own directory written as ``RUN``."""
    config = _read_yaml(path, dict)
    paths = config.get("paths")
    own = str((paths.get("output_dir") if isinstance(paths, dict) else None) or path.parent)
    return {
        key: value.replace(own, "RUN") if isinstance(value, str) else value
        for key, value in flat(config).items()
    }


def _read_list(path: Path) -> list[Any]:
    return _read_yaml(path, list)


def _read_yaml(path: Path, kind: type[Content]) -> Content:
    content = yaml.safe_load(path.read_text("utf-8"))
    if not isinstance(content, kind):
        raise ValueError(f"it holds no {kind.__name__}")
    return content


def _read_text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")


def _read_curves(path: Path) -> pd.DataFrame:
    table = pd.read_csv(path)
    if "step" not in table:
        raise ValueError("it has no column 'step'")
    return table.apply(pd.to_numeric, errors="coerce")


def _read_record(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise FileNotFoundError(path)
    return record.load(path.parent)


def _moment(seconds: Any) -> str:
    return datetime.fromtimestamp(float(seconds)).strftime("%d %b %Y, %H:%M") if seconds else ""


def _mask_pictures(directory: Path) -> dict[str, dict[str, list[Path]]]:
    """Return the pictures of `MaskPictures`: by weight, then by kind, in the order of steps."""
    folders = sorted(path for path in directory.glob("*") if path.is_dir())
    return {
        folder.name: {kind: sorted(folder.glob(f"{kind}_[0-9]*.png")) for kind in ("mask", "age")}
        for folder in folders
    }
