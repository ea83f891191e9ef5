"""The plan: what each policy affects, determined by one step on a copy."""

import inspect
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gradpolicy.checks import check_integer
from gradpolicy.errors import PolicyError, shortened, shown, under
from gradpolicy.flow.install import checked_policies
from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.layers import names_in
from gradpolicy.optim.lost_updates import lost_updates_warning
from gradpolicy.planning.first_step import FirstStep, Optimizers, Step, first_step, of_kind
from gradpolicy.planning.plan_table import Plan, PlanRow
from gradpolicy.policies import FlowPolicy, Freeze, Policy, Stop
from gradpolicy.rates import Rates
from gradpolicy.tensors.mask import Mask, active_share
from gradpolicy.when import When, Window

# What happens to the optimizer state of an entry that freezes, by ``frozen_state``.
FATES = {
    "keep": "what freezes keeps its optimizer state",
    "zero": "what freezes loses its optimizer state",
    "drop": "what freezes loses its optimizer state, with Adam the memory too",
}


def plan(
    model: nn.Module,
    policies: Iterable[Policy] | Mapping[str, Policy],
    step: Step,
    *,
    seed: int = 0,
    optimizers: Optimizers | None = None,
) -> Plan:
    """Return the plan of policies: what each affects, determined by one step on a copy of the model.

    The model, its gradients and the random states do not change. The policies may already be installed on
    the model; other installed policies stay active.

    Args:
        model: The model.
        policies: The policies, by name or in a list.
        step: A function that does the forward pass of a training step with the given model and returns the
            loss, a scalar.
        seed: The seed of mask sources without a seed of their own.
        optimizers: The model's optimizers; None: those of its ``configure_optimizers``, if it has one.

    Returns:
        The plan, which prints as a table and displays in a notebook.

    Raises:
        PolicyError: If an entry is not a policy, a pattern matches nothing, an operation that a policy names
            is not called, two policies contradict each other, or the optimizer cannot freeze some entries of
            a tensor.

    Example:
        >>> import torch
        >>> import gradpolicy as gp
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> planned = gp.plan(model, {"cut": gp.Stop(modules="2")}, lambda copy: copy(torch.ones(1, 4)).sum())
        >>> planned.without_gradient
        ('0.weight', '0.bias')
    """
    if not callable(step):
        raise PolicyError(f"plan: needs a function from the model's copy to the loss, got {shown(step)}")
    named = checked_policies("plan", policies, Policy, "gradient policy")
    found = first_step(model, named, step, seed=check_integer("seed", seed), optimizers=optimizers)
    masks = {key: found.freezer.mask_of(key) for key in found.parameters}
    layers = found.freezer.what_trains(found.parameters)
    if not found.freezer.may_change:
        layers.check()
    sizes = {name: parameter.numel() for name, parameter in found.parameters.items()}
    getting = [name for name in sizes if found.gets_gradient(name)]
    without = [name for name, gradient in found.gradients.items() if gradient is None]
    return Plan(
        rows=tuple(_row(name, policy, found) for name, policy in named.items()),
        entries=sum(sizes.values()),
        training_entries=round(sum(sizes[name] * active_share(masks[name]) for name in getting)),
        cuts=tuple(
            f"{found.report[name].where} ({name}{', exact zeros' if stop.mode == 'zero' else ''})"
            for name, stop in of_kind(named, Stop).items()
            if found.report[name].matched
        ),
        without_gradient=tuple(without),
        zero_gradient=tuple(name for name in sizes if name not in (*getting, *without)),
        warnings=(
            *_vain_warnings(found, masks),
            *_idle_layers(found),
            *_lost_updates(found, masks),
            *found.warnings,
        ),
        layers=layers,
        idle=found.idle,
    )


def _vain_warnings(found: FirstStep, masks: Mapping[str, Mask]) -> Iterator[str]:
    """Yield a line for each policy on parameters that get no gradient, and for those of no policy."""
    for name, matched in found.matched.items():
        without, count = found.vain(name), len(matched)
        # No warning if the user has turned off the gradient of some of them.
        named = without if len(without) == count else [key for key in without if key in found.gradients]
        if not named:
            continue
        what = f"{len(named)} of its {count} parameters {'gets' if len(named) == 1 else 'get'} no gradient"
        if len(named) == count:
            what = f"none of its {count} parameters gets a gradient"
        yield f"{name}: {what} ({shortened(named)}): {_why_vain(named, found)}"
    matched_by_any = set().union(*found.matched.values())
    others = [key for key in found.parameters if key not in matched_by_any and masks[key] is not False]
    if (named := [key for key in others if not found.gets_gradient(key)]) and found.policies:
        yield f"{shortened(named)} train, but get no gradient: {_why_vain(named, found)}"


def _idle_layers(found: FirstStep) -> Iterator[str]:
    """Yield a line for each policy that does not count layers without a gradient, or counts them."""
    among: dict[str, Collection[str]] = dict(found.matched)
    for name, rates in of_kind(found.policies, Rates).items():
        among[name] = names_in(rates.layers_of(found.matched[name]))
    for name, layers in found.freezer.counted_layers().items():
        out = "exclude it (!…)" if name in found.freezer.policies else "name it in a pattern before"
        if layers and (left := set(among[name]) & set(found.idle) - names_in(layers)):
            yield (
                f"{name}: {shortened(sorted(left))} get no gradient and make no layer; training without a "
                f"plan may count one: {out}"
            )
        reached = [layer for layer in layers if any(map(found.gets_gradient, layer.parameters))]
        if reached and (idle := [layer.name for layer in layers if layer not in reached]):
            yield f"{name}: counts {shortened(idle)} as a layer, which gets no gradient: {out}"


def _lost_updates(found: FirstStep, masks: Mapping[str, Mask]) -> Iterator[str]:
    """Yield a line for the parameters of 16 bits that train and lose most of their updates."""
    freeze = of_kind(found.policies, Freeze)
    kept = set().union(*(found.matched[name] for name, each in freeze.items() if each.master_weights))
    if losing := [
        key for key in found.losing if key in masks and masks[key] is not False and key not in kept
    ]:
        yield lost_updates_warning(losing)


def _why_vain(names: Iterable[str], found: FirstStep) -> str:
    if any(found.gradients.get(name) is not None for name in names):
        return (
            "a rounding or another step before the loss passes only zeros, unless a policy such as "
            "straight_through gives it a gradient"
        )
    return "the loss does not depend on them, or a stop or detach cuts them off"


# ---- the rows


def _row(name: str, policy: Policy, found: FirstStep) -> PlanRow:
    """Return the row of a policy.

    Raises:
        PolicyError: If a policy on learning rates has nothing for a parameter.
    """
    kind, parameters = type(policy).__name__, found.matched.get(name, {})
    row: dict[str, Any] = {
        "what": kind,
        "where": f"params {', '.join(getattr(policy, 'params', ()))}",
        "parameters": tuple(parameters),
    }
    if isinstance(policy, FlowPolicy):
        report = found.report[name]
        row["where"] = report.where
        row["modules"] = tuple(report.locations.modules) if policy.modules else ()
        row["operations"] = dict(report.matched) if policy.ops else {}
    elif isinstance(policy, Rates):
        with under(f"policy.{name}.params"):
            row["course"] = policy.course(parameters, found.idle)
    elif isinstance(policy, Freeze):
        row |= _of_masks(name, policy, found)
    when = policy.when
    return PlanRow(name=name, policy=kind, phases=tuple(when.phases), when=_moments(when), **row)


def _of_masks(name: str, policy: Freeze, found: FirstStep) -> dict[str, Any]:
    """Return the cells of a freeze policy."""
    source, masks = found.freezer.policies[name].source, found.freezer.policies[name].masks
    sizes = {key: parameter.numel() for key, parameter in found.matched[name].items()}
    active = {key: size * active_share(masks[key]) for key, size in sizes.items()}
    entries, vain = sum(sizes.values()), found.vain(name)
    kind = type(policy.mask).__name__
    arguments = ", ".join(f"{key}={value}" for key, value in policy.mask.describe().items())
    return {
        "what": f"{type(policy).__name__} · {kind}",
        "entries": entries,
        "active_share": sum(active.values()) / max(entries, 1),
        "training_share": sum(count for key, count in active.items() if key not in vain) / max(entries, 1),
        "groups": tuple(group.name for group in source.layer_groups),
        "course": f"{kind}({arguments}) {_timetable(policy.mask)}; {FATES[policy.frozen_state]}",
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
    counts = _counts(when.every, when) if when.changes else ""
    return ", ".join(filter(None, (phases, counts)))


def _counts(every: int, window: Window) -> str:
    often = window.unit if every == 1 else f"{every} {window.unit}s"
    begin = f" from {window.unit} {window.start}" if window.start else ""
    end = "" if window.stop is None else f" until {window.unit} {window.stop}"
    return f"every {often}{begin}{end}"


def training_loss(module: Any, batch: Any, batch_index: int = 0) -> Tensor:
    """Return the loss of a LightningModule's ``training_step``, which may take the batch without its index.

    Raises:
        PolicyError: If the step returns no loss.
    """
    taken = inspect.signature(module.training_step).parameters.values()
    alone = len(taken) == 1 and all(each.kind is not each.VAR_POSITIONAL for each in taken)
    with warnings.catch_warnings():
        # Without a Trainer Lightning warns at each call that logs.
        warnings.simplefilter("ignore")
        result = module.training_step(*((batch,) if alone else (batch, batch_index)))
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise PolicyError(f"{type(module).__name__}.training_step gave no loss, but {type(loss).__name__}")
    return loss
