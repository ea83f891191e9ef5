"""What the record says of flow policies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradpolicy.insight.record.columns import numbers
from gradpolicy.lightning.callback import GradientPolicies

Measured = dict[str, dict[str, float]]
"""By policy: squared norms ``before`` and ``after``; how many ``zeros`` passed, of how many ``entries``."""


class FlowRecord:
    """Counts what flow policies meet, each phase by itself.

    Args:
        policies: The callback that runs the policies.
        former: The one of the stage before, whose counts go on.
    """

    def __init__(self, policies: GradientPolicies, former: FlowRecord | None = None) -> None:
        self._policies = policies
        self._operations: dict[str, Counter[str]] = {} if former is None else former._operations
        # How far the counts of the installed policies had come at the last look.
        self._seen: Counter[str] = Counter()

    def count(self, phase: str) -> None:
        """Counts what was met since the last look as met in a phase."""
        if self._policies.installed is not None:
            met = Counter(self._policies.installed.operation_counts)
            counts = self._operations.setdefault(phase, Counter())
            counts.update({name: met[name] - self._seen[name] for name in met})
            self._seen = met

    def state(self) -> dict[str, dict[str, int]]:
        """What was met since the last row, by phase and policy."""
        return {phase: dict(counts) for phase, counts in self._operations.items()}

    def restore(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Goes on from what `state` gave."""
        self._operations = {phase: Counter(counts) for phase, counts in state.items()}

    def take(self, phase: str) -> dict[str, Any]:
        """What this process's policies met in a phase since its last row, and measured; empty without any.

        What lies on a device stays there until `read`.
        """
        installed = self._policies.installed
        if installed is None:
            return {}
        self.count(phase)
        named = self._policies.flow_policies.items()
        norms, zeros = installed.gradient_norms, installed.zeros_passed
        return {
            "active": {
                name: installed.is_active(name) for name, policy in named if phase in policy.when.phases
            },
            "operations": self._operations.pop(phase, Counter()),
            "norms": [(name, *pair) for name, pair in norms.items()],
            "zeros": [(name, *pair) for name, pair in zeros.items()],
        }

    @staticmethod
    def read(taken: Mapping[str, Any]) -> dict[str, Any]:
        """What `take` gave, with the numbers that still lay on a device."""
        if not taken:
            return {}
        measured: Measured = {}
        values = iter(numbers([norm for _, *pair in taken["norms"] for norm in pair]))
        for name, *_ in taken["norms"]:
            measured[name] = {"before": next(values) ** 2, "after": next(values) ** 2}
        counts = numbers([count for _, count, _ in taken["zeros"]])
        for (name, _, entries), count in zip(taken["zeros"], counts, strict=True):
            measured.setdefault(name, {}).update(zeros=count, entries=entries)
        return {"active": taken["active"], "operations": taken["operations"], "measured": measured}


_KEYS = ("before", "after", "zeros", "entries")


def flow_rows(phase: str, of_ranks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a phase: counts of the first process, norms and zeros of all of them.

    Each process's loss is a mean over its own samples, and their mean is trained on: norms are those of
    the gradient of that mean.
    """
    first = of_ranks[0]
    for name, active in first.get("active", {}).items():
        measured = [each["measured"][name] for each in of_ranks if name in each.get("measured", {})]
        total = {key: sum(each.get(key, 0.0) for each in measured) for key in _KEYS}
        yield {
            "kind": "flow",
            "policy": name,
            "phase": phase,
            "operations": first["operations"][name],
            "gradient_norm_before": math.sqrt(total["before"]) / len(of_ranks) if measured else None,
            "gradient_norm_after": math.sqrt(total["after"]) / len(of_ranks) if measured else None,
            "zeros_passed": total["zeros"] / total["entries"] if total["entries"] else None,
            "active": active,
        }
