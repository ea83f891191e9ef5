"""Compares runs: their configs, and the differences of metrics that exceed the spread over seeds."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from gradpolicy.display import three_digits
from gradpolicy.insight.report.reading import Run, is_bookkeeping

# The value of a key that a config does not have.
ABSENT = "–"
LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """One key of the config, and its value in each of several configs.

    Args:
        key: The key, or the node that some configs lack.
        values: The values in full: by these, runs are told apart.
        shown: The values for people: policies by name, numbers with three digits.
    """

    key: str
    values: tuple[str, ...]
    shown: tuple[str, ...]

    @property
    def name(self) -> str:
        """The key, shortened: its last part, after the name of the policy that it belongs to."""
        parts = [part for part in _parts(self.key) if part != "_target_"]
        return f"{parts[1]}.{parts[-1]}" if parts[0] == "policy" and len(parts) > 2 else parts[-1]

    def label(self, index: int) -> str:
        """Name the value in one of the configs, as in ``lr=0.01``; empty where the config lacks it."""
        value, parts = self.shown[index], _parts(self.key)
        if value == ABSENT:
            return ""
        return value if parts[0] == "policy" and len(parts) <= 2 else f"{self.name}={value}"

    def by_value(self, runs: Sequence[Run]) -> dict[str, list[str]]:
        """Name the runs that have each value."""
        found: dict[str, list[str]] = {}
        for value, run in zip(self.shown, runs, strict=True):
            found.setdefault(value, []).append(run.name)
        return found


@dataclass(frozen=True)
class Group:
    """Runs whose configs are the same, apart from the seed.

    Args:
        label: The values in which groups differ.
        runs: Its runs.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def ended(self) -> tuple[Run, ...]:
        """The runs that were completed; the others are in no mean."""
        return tuple(run for run in self.runs if not run.broken_off)

    def values(self, metric: str) -> list[float]:
        """Return the final value of a metric in each run that was completed and has a finite one."""
        found = (run.final_metrics.get(metric, math.nan) for run in self.ended)
        return [value for value in found if math.isfinite(value)]


@dataclass(frozen=True)
class Comparison:
    """How two groups differ in one metric.

    Args:
        metric: The metric.
        first: The label of one group.
        second: The label of the other.
        difference: Mean of the second minus mean of the first.
        p: The p-value of Welch's t-test, after Holm's correction; NaN where a group has a single run.
    """

    metric: str
    first: str
    second: str
    difference: float
    p: float

    @property
    def exceeds(self) -> bool:
        """True if the difference exceeds the spread over seeds."""
        return self.p < LEVEL


def config_differences(configs: Sequence[Mapping[str, Any]], skip: Sequence[str] = ()) -> list[Difference]:
    """Return the keys whose values are not the same in all configs, apart from where runs are kept.

    A node that some configs lack as a whole, such as a policy, is one difference. A key that refers to
    another one, as ``data.seed`` does to ``seed``, has its name and its values, and is left out.

    Args:
        configs: Flat configs.
        skip: Further keys to leave out.
    """
    keys = list(dict.fromkeys(key for config in configs for key in config if not is_bookkeeping(key)))
    nodes = [_nodes(config) for config in configs]
    differing: dict[tuple[str, tuple[str, ...]], Difference] = {}
    for key in keys:
        # The outermost node around it that a config lacks.
        above = [".".join(_parts(key)[:depth]) for depth in range(1, key.count(".") + 1)]
        whole = next((node for node in above if any(node not in each for each in nodes)), key)
        values = tuple(_text(config, whole) for config in configs)
        if len(set(values)) > 1:
            name = (_parts(whole)[-1], values)
            former = differing.get(name)
            if former is None or len(whole) < len(former.key):
                differing[name] = Difference(whole, values, _shown(configs, whole, values))
    groups = list(dict.fromkeys(_parts(key)[0] for key in keys))
    found = [each for each in differing.values() if each.key not in skip]
    return sorted(found, key=lambda each: groups.index(_parts(each.key)[0]))


def _nodes(config: Mapping[str, Any]) -> set[str]:
    """Return the keys that have others below them."""
    return {".".join(_parts(key)[:depth]) for key in config for depth in range(1, key.count(".") + 1)}


def _parts(key: str) -> list[str]:
    return key.split(".")


def _text(config: Mapping[str, Any], key: str) -> str:
    """Return the value of a key, or all that lies below it, as text."""
    if key in config:
        return str(config[key])
    below = {
        name.removeprefix(f"{key}."): value for name, value in config.items() if name.startswith(f"{key}.")
    }
    kind = [str(below.pop("_target_")).rpartition(".")[2]] if "_target_" in below else []
    return " ".join([*kind, *(f"{name}={value}" for name, value in below.items())]) or ABSENT


def _shown(configs: Sequence[Mapping[str, Any]], key: str, values: Sequence[str]) -> tuple[str, ...]:
    """Shorten values, as long as they stay different."""
    short = tuple(_short_text(config, key) for config in configs)
    return short if len(set(short)) == len(set(values)) else tuple(values)


def _short_text(config: Mapping[str, Any], key: str) -> str:
    """Return the value of a key, numbers with three digits; of policies, the names."""
    parts = _parts(key)
    if parts[0] == "policy" and len(parts) <= 2 and config.get(key) is None:
        inside = [_parts(name) for name in config if name.startswith(f"{key}.")]
        return " + ".join(dict.fromkeys(name[1] for name in inside)) or ABSENT
    if key == "policy":
        return "none"
    value = config.get(key)
    if isinstance(value, list):
        return ", ".join(map(three_digits, value))
    if parts[-1] == "_target_":
        return str(value).rpartition(".")[2]
    return _text(config, key) if value is None else three_digits(value)


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ in nothing but the seed; those without a config stand alone."""
    members: dict[tuple[Any, ...], list[Run]] = {}
    differences = config_differences([run.config for run in runs], skip=["seed"])
    for index, run in enumerate(runs):
        values = tuple(difference.values[index] for difference in differences)
        members.setdefault(values if run.config else (run.name,), []).append(run)
    found = []
    for own in members.values():
        index = runs.index(own[0])
        labels = [label for difference in differences if (label := difference.label(index))]
        found.append(Group(_shortened(labels) or own[0].name, tuple(own)))
    return _unique(found)


def _shortened(labels: Sequence[str], most: int = 3) -> str:
    return ", ".join(labels[:most]) + (f" and {len(labels) - most} more" if len(labels) > most else "")


def _unique(groups: list[Group]) -> list[Group]:
    """Add a run's name to labels that several groups have."""
    labels = [group.label for group in groups]
    return [
        Group(f"{group.label} ({group.runs[0].name})", group.runs) if labels.count(group.label) > 1 else group
        for group in groups
    ]


def compared_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics to compare: of test and validation, those that any run ended with."""
    names = dict.fromkeys(name for run in runs for name in run.final_metrics)
    chosen = [name for name in names if name.startswith(("test/", "val/")) and "/policy/" not in name]
    return sorted(chosen, key=lambda name: (not name.startswith("test/"), name))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the sample standard deviation (divisor n − 1; NaN for a single value).

    Example:
        >>> spread([1.0, 3.0])
        (2.0, 1.4142135623730951)
    """
    if not values:
        return math.nan, math.nan
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def compare(groups: Sequence[Group], metrics: Sequence[str]) -> list[Comparison]:
    """Compare each pair of groups in each metric.

    The criterion is Welch's two-sided t-test (Welch 1947), which does not take the spreads to be equal, with
    Holm's correction (Holm 1979) over all the comparisons made here. A group of a single run has no spread,
    so nothing is said of it.
    """
    pairs = [
        (metric, first, second)
        for metric in metrics
        for first, second in itertools.combinations(groups, 2)
        if first.values(metric) and second.values(metric)
    ]
    raw = [welch(first.values(metric), second.values(metric)) for metric, first, second in pairs]
    return [
        Comparison(
            metric,
            first.label,
            second.label,
            spread(second.values(metric))[0] - spread(first.values(metric))[0],
            p,
        )
        for (metric, first, second), p in zip(pairs, holm(raw), strict=True)
    ]


def welch(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of Welch's two-sided t-test; NaN if one has fewer than two values.

    Without any spread on both sides, means that differ have p = 0 and equal ones p = 1.
    """
    if min(len(first), len(second)) < 2:
        return math.nan
    if spread(first)[1] == spread(second)[1] == 0:
        return float(first[0] == second[0])
    return float(stats.ttest_ind(first, second, equal_var=False).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values after Holm's correction (Holm 1979).

    The i-th smallest of n is multiplied by n − i + 1; none falls below the one before or exceeds 1. NaN stays
    NaN and does not count.

    Example:
        >>> holm([0.01, 0.04, float("nan")])
        [0.02, 0.04, nan]
    """
    given = np.array(p_values, dtype=float)
    # NaN is sorted last.
    order = np.argsort(given)[: np.count_nonzero(~np.isnan(given))]
    corrected = np.full(len(given), math.nan)
    scaled = given[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    found: list[float] = corrected.tolist()
    return found
