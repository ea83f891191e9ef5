"""Reads the files of runs for a report, naming missing ones, and compares runs."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from gradpolicy.display import three_digits
from gradpolicy.errors import brief
from gradpolicy.files import is_inside, read_json
from gradpolicy.insight import record
from gradpolicy.insight.run_files import AUDIT, PLAN, RESULT, AuditFile, Result, flat
from gradpolicy.planning.plan_table import Plan
from gradpolicy.train.lightning.runs import RunRecord

WARNING = re.compile(r"\bwarning: (.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """The content of a run directory.

    Args:
        directory: The run directory.
        name: The name of the run in the report.
        config: The resolved config, values by dotted key; ``policy`` has the names of the policies.
        plan: ``plan.json``; None if there is none.
        result: ``result.json``.
        began: ``run.json``.
        audit: ``audit.json``.
        log: ``train.log``.
        metrics: The curves: a row for each logged step, a column for each metric.
        record: The table of ``record.jsonl``.
        missing: For each missing file, the reason and the missing part of the report.
    """

    directory: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    result: Result | None = None
    began: RunRecord | None = None
    audit: AuditFile | None = None
    log: str = ""
    metrics: pd.DataFrame = field(default_factory=partial(pd.DataFrame, columns=["step"]))
    record: pd.DataFrame = field(default_factory=partial(record.table_of, []))
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def final_metrics(self) -> Mapping[str, float]:
        """The last value of each metric, from the result, or from the curves if the run did not end."""
        if self.result and self.result.metrics:
            return self.result.metrics
        numbers = self.metrics.drop(columns=["step", "epoch"], errors="ignore")
        return {} if numbers.empty else numbers.ffill().iloc[-1].dropna().to_dict()

    @property
    def metrics_by_stage(self) -> Mapping[str, Sequence[str]]:
        """The names of the final metrics by their first parts, without those of policies."""
        names = sorted(name.split("/") for name in self.final_metrics if "policy/" not in name)
        return {stage: ["/".join(name) for name in group] for stage, group in groupby(names, itemgetter(0))}

    @property
    def status(self) -> str:
        """The status of the run."""
        return self.result.status if self.result else "not finished"

    @property
    def broken_off(self) -> bool:
        """True if the run was not completed; False without a config, since it is not known."""
        return self.status in ("failed", "stopped") or (bool(self.config) and not self.result)

    @property
    def last_step(self) -> int:
        """The last recorded or logged step; 0 if there is none."""
        return int(max([0, *self.record["step"], *self.metrics["step"].dropna()]))

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        result = self.result or Result([])
        return f"{result.program} {shlex.join(result.overrides)}".rstrip()

    @property
    def started(self) -> str:
        """The start time, as text."""
        return f"{datetime.fromtimestamp(self.began.started):%d %b %Y, %H:%M}" if self.began else ""

    @property
    def warnings(self) -> Sequence[str]:
        """The warnings of the plan and of the log, each once."""
        planned = self.plan.warnings if self.plan else ()
        return list(dict.fromkeys([*planned, *WARNING.findall(self.log)]))

    def rows(self, kind: str) -> pd.DataFrame:
        """Return the rows of one kind in the record."""
        return self.record[self.record["kind"] == kind]


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
    contents: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for key, (file, purpose, reader) in FILES.items():
        path = max(directory.glob(file), key=lambda path: path.lstat().st_mtime, default=directory / file)
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is no regular file")
            if not is_inside(path, directory):
                raise ValueError("it is a link out of the directory")
            contents[key] = reader(path)
        except FileNotFoundError:
            missing[file] = f"is absent, and with it {purpose}"
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            reason = brief(" ".join(str(error).split()).replace(f"{path}, ", ""), most=160)
            missing[file] = f"cannot be read ({reason}), and with it {purpose} is missing"
    return Run(directory, name or directory.name, missing=missing, **contents)


def _read_config(path: Path) -> dict[str, Any]:
    """Return a config by dotted key, with ``RUN`` for the run's directory, and the names of policies."""
    config = yaml.safe_load(path.read_text("utf-8"))
    if not isinstance(config, dict):
        raise ValueError("it has no dict")
    home = str(flat(config).get("paths.output_dir") or path.parent)
    texts = {key: value.replace(home, "RUN") for key, value in flat(config).items() if isinstance(value, str)}
    policies = config.get("policy")
    names = " + ".join(map(str, policies)) if isinstance(policies, dict) else ""
    return {**flat(config), **texts, "policy": names or "none"}


def _read_curves(path: Path) -> pd.DataFrame:
    table = pd.read_csv(path)
    if "step" not in table:
        raise ValueError("it has no column 'step'")
    return table.apply(pd.to_numeric, errors="coerce")


def _read_record(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise FileNotFoundError(path)
    return record.load(path.parent)


# The files of a run by the fields of `Run`: their names, what is missing without them, how they are read.
FILES: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "plan": (PLAN, "the plan, and what trains", partial(read_json, model=Plan)),
    "audit": (AUDIT, "the proof", partial(read_json, model=AuditFile)),
    "result": (RESULT, "final results; the run did not end well", partial(read_json, model=Result)),
    "began": ("run.json", "when it began", partial(read_json, model=RunRecord)),
    "log": (
        "train.log",
        "warnings given during training",
        partial(Path.read_text, encoding="utf-8", errors="replace"),
    ),
    "config": ("config.yaml", "what was asked", _read_config),
    "metrics": ("csv/*/metrics.csv", "curves", _read_curves),
    "record": ("record.jsonl", "masks, gradient norms", _read_record),
}


# ---- comparison

# Keys that always differ between runs.
BOOKKEEPING = ("paths.", "hydra.", "logger.", "extras.", "ckpt_path", "tags", "task_name")
# The value of a key that a config does not have.
ABSENT = "–"


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

    def spread(self, metric: str) -> tuple[float, float]:
        """Return the mean of the final values of a metric that are finite, over the completed runs.

        Returns:
            The mean, and the sample standard deviation (divisor n − 1; NaN for a single value).
        """
        values = pd.Series([run.final_metrics.get(metric) for run in self.ended], dtype=float)
        finite = values[np.isfinite(values)]
        return float(finite.mean()), float(finite.std())


def config_differences(configs: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the values in which configs differ, as text: a row for each config, a column for each key.

    Paths of runs are left out. Numbers have three digits if they remain distinct. If some configs do not have
    a policy, only its name is a difference.
    """
    table = {}
    for key in dict.fromkeys(key for config in configs for key in config if not key.startswith(BOOKKEEPING)):
        values = [str(config.get(key, ABSENT)) for config in configs]
        short = list(map(three_digits, values))
        if len(set(values)) > 1 and _is_shared(key, configs):
            table[key] = short if len(set(short)) == len(set(values)) else values
    return pd.DataFrame(table, range(len(configs)))


def _is_shared(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Return True unless a key is of a policy that some configs do not have."""
    policy = ".".join(key.split(".")[:2]) + "."
    return not key.startswith("policy.") or all(
        any(each.startswith(policy) for each in config) for config in configs
    )


def _short(key: str) -> str:
    """Return the last part of a key, after the name of its policy."""
    first, *parts = key.split(".")
    return f"{parts[0]}.{parts[-1]}" if first == "policy" and len(parts) > 1 else [first, *parts][-1]


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in the seed; runs without a config are single."""
    differences = config_differences([run.config for run in runs])
    others = [key for key in differences if _short(key) != "seed"]
    members: dict[str, list[Run]] = {}
    for run, (_, values) in zip(runs, differences[others].iterrows(), strict=True):
        # Keys that refer to another one have its name and value.
        parts = dict.fromkeys(f"{_short(key)}={value}" for key, value in values.items())
        label = ", ".join(parts).removeprefix("policy=")
        members.setdefault(label if run.config else run.name, []).append(run)
    return [Group(label or group[0].name, group) for label, group in members.items()]


def compared_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics to compare: the final test and validation metrics of any run."""
    names = dict.fromkeys(name for run in runs for name in run.final_metrics)
    chosen = [name for name in names if name.startswith(("test/", "val/")) and "/policy/" not in name]
    return sorted(chosen, key=lambda name: (not name.startswith("test/"), name))
