"""The rows of a plan, a function for each kind of policy."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from gradpolicy.errors import under
from gradpolicy.flow.policy_report import ReportRow
from gradpolicy.masks.base import MaskSource
from gradpolicy.planning.first_step import FirstStep
from gradpolicy.planning.plan_table import PlanRow
from gradpolicy.policies import FlowPolicy, Freeze, Policy
from gradpolicy.rates import Rates
from gradpolicy.tensors.mask import active_share
from gradpolicy.when import When, Window

# What happens to the optimizer state of an entry that freezes, by ``frozen_state``.
FATES = {
    "keep": "what freezes keeps its optimizer state",
    "zero": "what freezes loses its optimizer state",
    "drop": "what freezes loses its optimizer state, with Adam the memory too",
}


def row_of(
    name: str,
    policy: Policy,
    parameters: Mapping[str, nn.Parameter],
    step: FirstStep,
    vain: tuple[str, ...],
) -> PlanRow:
    """Return the row of a policy.

    Args:
        name: The policy's name.
        policy: The policy.
        parameters: The parameters that it matches.
        step: The findings of the first step.
        vain: Those parameters that get no gradient, or only zeros.

    Raises:
        PolicyError: If a policy on learning rates has nothing for a parameter.
    """
    own: dict[str, Any] = {}
    if isinstance(policy, FlowPolicy):
        own = _of_flow(policy, step.report[name])
    elif isinstance(policy, Rates):
        with under(f"policy.{name}.params"):
            own = {"course": policy.course(parameters)}
    elif isinstance(policy, Freeze):
        own = _of_masks(name, policy, parameters, step, vain)
    params = {"where": f"params {', '.join(getattr(policy, 'params', ()))}", "parameters": tuple(parameters)}
    kind = type(policy).__name__
    shared = {"what": kind, "phases": policy.when.phases, "when": _moments(policy.when), **params}
    return PlanRow(name=name, policy=kind, **{**shared, **own})


def _of_flow(policy: FlowPolicy, row: ReportRow) -> dict[str, Any]:
    return {
        "where": row.where,
        "modules": row.modules if policy.modules else (),
        "operations": dict(row.matched) if policy.ops else {},
        "parameters": row.parameters,
    }


def _of_masks(
    name: str,
    policy: Freeze,
    parameters: Mapping[str, nn.Parameter],
    step: FirstStep,
    vain: Collection[str],
) -> dict[str, Any]:
    """Return the cells of a freeze policy."""
    source, masks = step.sources[name], step.masks[name]
    entries = sum(parameter.numel() for parameter in parameters.values())
    active = {
        key: parameter.numel() * active_share(masks.get(key, True)) for key, parameter in parameters.items()
    }
    share = sum(active.values()) / max(entries, 1)
    kind = type(policy.mask).__name__
    arguments = ", ".join(f"{key}={value}" for key, value in policy.mask.describe().items())
    course = f"{kind}({arguments}) {_timetable(policy.mask)}"
    return {
        "what": f"{type(policy).__name__} · {kind}",
        "entries": entries,
        "active_share": share,
        "training_share": sum(count for key, count in active.items() if key not in vain) / max(entries, 1),
        "groups": tuple(group.name for group in source.layer_groups),
        "course": f"{course}; {FATES[policy.frozen_state]}",
        "vain": vain,
    }


def _timetable(source: MaskSource) -> str:
    """Return when a source's masks may change, as in ``may change every 5 steps from step 10``."""
    times = source.timetable
    if times.every is None:
        return "is chosen once" + (f" at {times.unit} {times.start}" if times.start else "")
    return f"may change {_counts(times.every, times)}"


def _moments(when: When) -> str:
    """Return when a policy is active, as in ``in fit, test, every 2 epochs``; empty for all of training."""
    phases = "" if when.phases == ("fit",) else f"in {', '.join(when.phases)}"
    counts = "" if (when.start, when.stop, when.stride) == (0, None, 1) else _counts(when.stride, when)
    return ", ".join(filter(None, (phases, counts)))


def _counts(every: int, window: Window) -> str:
    often = window.unit if every == 1 else f"{every} {window.unit}s"
    begin = f" from {window.unit} {window.start}" if window.start else ""
    end = "" if window.stop is None else f" until {window.unit} {window.stop}"
    return f"every {often}{begin}{end}"
