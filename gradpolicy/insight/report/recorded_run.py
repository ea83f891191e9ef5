"""Reads the files of runs for a report, naming missing ones, and compares runs."""

import math
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

from gradpolicy.display import three_digits
from gradpolicy.errors import brief
from gradpolicy.files import is_inside, read_json
from gradpolicy.insight import record
from gradpolicy.insight.run_files import AUDIT, PLAN, RESULT, AuditFile, Result, flat
from gradpolicy.planning.plan_table import Plan
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
        """The command that repeats the run."""
        return f"{self.result.get('program', 'python train.py')} {shlex.join(self.overrides)}".rstrip()

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


# ---- comparison

# Keys that always differ between runs.
BOOKKEEPING = ("paths.", "hydra.", "logger.", "extras.", "ckpt_path", "tags", "task_name")
# The value of a key that a config does not have.
ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    """One key of the config, and its value in each of several configs, as text."""

    key: str
    values: tuple[str, ...]

    @property
    def shown(self) -> list[str]:
        """The values for display: numbers with three digits if they remain distinct."""
        short = [three_digits(value) for value in self.values]
        return short if len(set(short)) == len(set(self.values)) else list(self.values)

    @property
    def name(self) -> str:
        """The shortened key: its last part, after the name of its policy."""
        first, *parts = self.key.split(".")
        return f"{parts[0]}.{parts[-1]}" if first == "policy" and len(parts) > 1 else [first, *parts][-1]


@dataclass(frozen=True)
class Group:
    """Runs whose configs are equal except for the seed.

    Args:
        label: The values in which groups differ.
        runs: Its runs.
    """

    label: str
    runs: Sequence[Run]

    @property
    def ended(self) -> list[Run]:
        """The completed runs; the others do not count in means."""
        return [run for run in self.runs if not run.broken_off]

    def values(self, metric: str) -> list[float]:
        """Return the final value of a metric in each run that was completed and has a finite one."""
        found = (run.final_metrics.get(metric, math.nan) for run in self.ended)
        return [value for value in found if math.isfinite(value)]


def config_differences(configs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return the keys whose values differ between configs, without paths of runs.

    If some configs do not have a policy, only its name is a difference.
    """
    differing = []
    for key in dict.fromkeys(key for config in configs for key in config):
        policy = ".".join(key.split(".")[:2]) + "."
        is_shared = all(any(name.startswith(policy) for name in config) for config in configs)
        if key.startswith(BOOKKEEPING) or (key.startswith("policy.") and not is_shared):
            continue
        values = tuple(str(config.get(key, ABSENT)) for config in configs)
        if len(set(values)) > 1:
            differing.append(Difference(key, values))
    return differing


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in the seed; runs without a config are single."""
    differences = [each for each in config_differences([run.config for run in runs]) if each.name != "seed"]
    members: dict[str, list[Run]] = {}
    for index, run in enumerate(runs):
        # Keys that refer to another one have its name and value.
        values = dict.fromkeys(f"{each.name}={each.shown[index]}" for each in differences)
        label = ", ".join(values).removeprefix("policy=")
        members.setdefault(label if run.config else run.name, []).append(run)
    return [Group(label or own[0].name, own) for label, own in members.items()]


def compared_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics to compare: the final test and validation metrics of any run."""
    names = dict.fromkeys(name for run in runs for name in run.final_metrics)
    chosen = [name for name in names if name.startswith(("test/", "val/")) and "/policy/" not in name]
    return sorted(chosen, key=lambda name: (not name.startswith("test/"), name))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the sample standard deviation (divisor n − 1; NaN for a single value).

    Example:
        >>> spread([1.0, 3.0])
        (2.0, 1.4142135623730951)
    """
    series = pd.Series(values, dtype=float)
    return float(series.mean()), float(series.std())
