"""Compares runs: their configs, and their metrics by groups that differ in the seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from gradpolicy.display import three_digits
from gradpolicy.insight.report.recorded_run import Run

# Keys that always differ between runs.
BOOKKEEPING = ("paths.", "hydra.", "logger.", "extras.", "ckpt_path", "tags", "task_name", "callbacks.study.")
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
