"""Reads the files of a run for its report; names missing and damaged ones."""

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

from gradpolicy.atomic_file import is_inside
from gradpolicy.errors import brief
from gradpolicy.insight import record
from gradpolicy.insight.run_files import ADDED_BY_SEARCH, AUDIT, PLAN, RESULT, AuditFile, Result, flat
from gradpolicy.planning.plan_table import Plan
from gradpolicy.train.json_file import read_json
from gradpolicy.train.lightning.runs import RunRecord

Content = TypeVar("Content")

WARNING = re.compile(r"\bwarning: (.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """The content of a run directory.

    Args:
        directory: The run directory.
        name: The name of the run in the report.
        config: The resolved config, values by dotted key; ``policy`` has the names of the policies.
        overrides: The overrides of the command line.
        plan: ``plan.json``; None if there is none.
        result: ``result.json``.
        metrics: The curves: a row for each logged step, a column for each metric.
        record: The record: a row for each line of ``record.jsonl``.
        audit: ``audit.json``.
        started: The start time, as text.
        warnings: The warnings of the plan and of the log, each once.
        versions: The versions of the libraries.
        missing: For each missing file, the reason and the missing part of the report.
    """

    directory: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    plan: Plan | None = None
    result: Mapping[str, Any] = field(default_factory=dict)
    metrics: pd.DataFrame = field(default_factory=pd.DataFrame)
    record: pd.DataFrame = field(default_factory=pd.DataFrame)
    audit: Mapping[str, Any] = field(default_factory=dict)
    started: str = ""
    warnings: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def final_metrics(self) -> Mapping[str, float]:
        """The last value of each metric, from the result, or from the curves if the run did not end."""
        if self.result.get("metrics"):
            return {name: float(value) for name, value in self.result["metrics"].items()}
        numbers = self.metrics.drop(columns=["step", "epoch"], errors="ignore")
        known = {str(name): column.dropna() for name, column in numbers.items()}
        return {name: float(column.iloc[-1]) for name, column in known.items() if len(column)}

    @property
    def status(self) -> str:
        """The status of the run."""
        return str(self.result.get("status", "not finished"))

    @property
    def broken_off(self) -> bool:
        """True if the run was not completed; False without a config, since it is not known."""
        return self.status in ("failed", "stopped") or (bool(self.config) and not self.result)

    @property
    def last_step(self) -> int:
        """The last recorded or logged step; 0 if there is none."""
        steps = [table["step"].max() for table in (self.record, self.metrics) if "step" in table]
        return int(max((step for step in steps if step == step), default=0))

    @property
    def command(self) -> str:
        """The command that repeats the run, without the overrides added by a search."""
        words = [word for word in self.overrides if not word.startswith(ADDED_BY_SEARCH)]
        return f"{self.result.get('program', 'python train.py')} {shlex.join(words)}".rstrip()

    def rows(self, kind: str) -> pd.DataFrame:
        """Return the rows of one kind in the record; an empty table if there are none."""
        found = self.record[self.record["kind"] == kind] if "kind" in self.record else self.record
        return pd.DataFrame() if found.empty else found


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read runs, each once, named by as many parts of their directories as make the names distinct."""
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
    missing: dict[str, str] = {}

    def read(name: str, purpose: str, reader: Callable[[Path], Content], empty: Content) -> Content:
        path = directory / name
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is no regular file")
            if not is_inside(path, directory):
                raise ValueError("it is a link out of the directory")
            return reader(path)
        except FileNotFoundError:
            missing[name] = f"is absent, and with it {purpose}"
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            reason = brief(" ".join(str(error).split()).replace(f"{path}, ", ""), most=160)
            missing[name] = f"cannot be read ({reason}), and with it {purpose} is missing"
        return empty

    def read_model(name: str, purpose: str, model: type[Any]) -> dict[str, Any]:
        return read(name, purpose, lambda path: _as_plain(read_json(path, model)), {})

    plan = read(PLAN, "the plan, and what trains", lambda path: read_json(path, Plan), None)
    audit = read_model(AUDIT, "the proof", AuditFile)
    result = read_model(RESULT, "final results; the run did not end well", Result)
    began = read_model("run.json", "when it began", RunRecord)
    log = read("train.log", "warnings given during training", _read_text, "")
    found = directory.glob("csv/*/metrics.csv")
    curves = [path for path in found if path.is_file() and is_inside(path, directory)]
    curves.sort(key=lambda path: path.stat().st_mtime)
    metrics_file = str(curves[-1].relative_to(directory)) if curves else "csv/*/metrics.csv"
    warnings = [*(plan.warnings if plan else ()), *(match[1] for match in WARNING.finditer(log))]
    return Run(
        directory=directory,
        name=name or directory.name,
        config=read("config.yaml", "what was asked", _read_config, {}),
        overrides=result.get("overrides", ()),
        plan=plan,
        result=result,
        metrics=read(metrics_file, "curves", _read_curves, pd.DataFrame()),
        record=read("record.jsonl", "masks, gradient norms", _read_record, pd.DataFrame()),
        audit=audit,
        started=datetime.fromtimestamp(began["started"]).strftime("%d %b %Y, %H:%M") if began else "",
        warnings=list(dict.fromkeys(warnings)),
        versions=began.get("versions", {}),
        missing=missing,
    )


def _as_plain(content: Any) -> dict[str, Any]:
    return content.model_dump() if isinstance(content, BaseModel) else asdict(content)


def _read_config(path: Path) -> dict[str, Any]:
    """Return a config by dotted key, with ``RUN`` for the run's directory, and the names of policies."""
    config = yaml.safe_load(path.read_text("utf-8"))
    if not isinstance(config, dict):
        raise ValueError("it has no dict")
    own = str(flat(config).get("paths.output_dir") or path.parent)
    texts = {key: value.replace(own, "RUN") for key, value in flat(config).items() if isinstance(value, str)}
    policies = config.get("policy")
    names = " + ".join(map(str, policies)) if isinstance(policies, dict) else ""
    return {**flat(config), **texts, "policy": names or "none"}


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
