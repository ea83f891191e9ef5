"""The plan: what each policy affects, determined by one step on a copy."""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradpolicy.errors import PolicyError, shown, under
from gradpolicy.factors import divided_factors
from gradpolicy.flow import install
from gradpolicy.flow.install import deactivate, name_policies
from gradpolicy.flow.policy_checks import check_cuts
from gradpolicy.flow.policy_checks import remarks as flow_remarks
from gradpolicy.flow.policy_report import check_operations
from gradpolicy.freezing.diagnostics import copy_buffers, moving_parts, moving_warnings
from gradpolicy.freezing.freezer import check_same_options
from gradpolicy.freezing.requires_grad import is_turned_off
from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.topk import TopK
from gradpolicy.optim.optimizers import plain_optimizers
from gradpolicy.optim.other_optimizers import put_back_remarks
from gradpolicy.planning.plan_table import Plan, PlanModule, PlanRow
from gradpolicy.planning.plan_warnings import gets_gradient, trained_in_vain, vain_warnings
from gradpolicy.policies import FlowPolicy, ForwardMask, Freeze, Policy, Stop
from gradpolicy.rates import Rates
from gradpolicy.tensors.mask import active_entries, intersect
from gradpolicy.when import When, Window
from gradpolicy.where import named_parameters, pick_each, plain_name

if TYPE_CHECKING:
    from gradpolicy.flow.policy_report import ReportRow

Step = Callable[[nn.Module], Tensor]
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
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
            is not called, a stop leaves no active parameter with a gradient, two policies contradict each
            other, or the optimizer cannot freeze some entries of a tensor.

    Example:
        >>> import gradpolicy as gp
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> planned = gp.plan(model, {"cut": gp.Stop(modules="2")}, lambda copy: copy(torch.ones(1, 4)).sum())
        >>> planned.without_gradient
        ('0.weight', '0.bias')
    """
    policies = _checked(policies)
    flow = {name: policy for name, policy in policies.items() if isinstance(policy, FlowPolicy)}
    freeze = {name: policy for name, policy in policies.items() if isinstance(policy, Freeze)}
    forward = {name: policy for name, policy in policies.items() if isinstance(policy, ForwardMask)}
    matched = _matched(model, policies)
    with torch.random.fork_rng(devices=_cuda_devices(model)):
        duplicate = _duplicate(model, flow)
        optimized = named_parameters(duplicate if optimizers is None else model)
        trained_by = plain_optimizers(_optimizers(duplicate, optimizers))
        divided = tuple(divided_factors(policies, optimized, trained_by))
        buffers = copy_buffers(duplicate)
        rows, gradients, partly, acting = _flow_rows(duplicate, flow, step)
        moving = moving_parts(buffers, duplicate)
        parameters = _trainable(duplicate)
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        sources, masks = _freeze_masks(freeze, matched, duplicate, gradients, seed)
        unseen = _freeze_masks(forward, matched, duplicate, gradients, seed)[1]
        budgets = {
            name: _budget(source, gradients, lambda: step(duplicate)) for name, source in sources.items()
        }
    put_back = tuple(put_back_remarks(_partly_frozen(freeze, masks), optimized, trained_by))
    vain = trained_in_vain(policies, matched, gradients)
    # Policies that are active later do not affect the first step.
    first = {name: masks[name] for name, policy in freeze.items() if policy.when.active()}
    _check_cuts(flow, rows, gradients, first)
    for name, policy in policies.items():
        if isinstance(policy, Freeze):
            row = _freeze_row(name, policy, matched[name], sources[name], masks[name], vain[name])
            rows[name] = replace(row, budget=budgets[name], vain=vain[name])
        elif isinstance(policy, Rates):
            rows[name] = _rates_row(name, policy, matched[name])
        elif isinstance(policy, ForwardMask):
            rows[name] = _forward_row(name, policy, matched[name], unseen[name])
    planned = tuple(rows[name] for name in policies)
    without, zero = _without_gradient(gradients)
    return Plan(
        rows=planned,
        entries=sum(sizes.values()),
        training_entries=_training_entries(parameters, first, gradients),
        cuts=_cuts({name: flow[name] for name in flow if name in acting}, rows),
        without_gradient=without,
        zero_gradient=zero,
        warnings=(
            *vain_warnings(vain, matched, gradients),
            *partly,
            *flow_remarks(flow),
            *divided,
            *put_back,
            *moving_warnings(
                _frozen_tensors(masks, sources),
                moving,
                sizes,
                {name: policy.buffers for name, policy in freeze.items()},
            ),
        ),
        modules=_modules(model, planned),
    )


def _training_entries(
    parameters: Mapping[str, nn.Parameter], masks: Any, gradients: Mapping[str, Any]
) -> int:
    """Return the number of entries that get a gradient and are active in the first step."""
    getting = {name: each for name, each in parameters.items() if gets_gradient(gradients[name])}
    return round(sum(each.numel() * _share(each, masks, name) for name, each in getting.items()))


def training_loss(module: Any, batch: Any) -> Tensor:
    """Return the loss of a LightningModule's ``training_step``, without a Trainer.

    Raises:
        PolicyError: If the step returns no loss.
    """
    with warnings.catch_warnings():
        # Without a Trainer Lightning warns at each call that logs.
        warnings.simplefilter("ignore")
        result = module.training_step(batch, 0)
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise PolicyError(f"{type(module).__name__}.training_step gave no loss, but {type(loss).__name__}")
    return loss


def _checked(policies: Iterable[Policy] | Mapping[str, Policy]) -> dict[str, Policy]:
    """Return the policies by name.

    Raises:
        PolicyError: If an entry is not a policy.
    """
    if isinstance(policies, Policy):
        raise PolicyError("plan takes a list or dict of policies, not one policy")
    named = name_policies(policies)
    for name, policy in named.items():
        if not isinstance(policy, Policy):
            raise PolicyError(f"policy {shown(name)}: must be a gradient policy, got {shown(policy)}")
    return named


def _matched(model: nn.Module, policies: Mapping[str, Policy]) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters that each policy with ``params`` matches."""
    params = {name: getattr(policy, "params", ()) for name, policy in policies.items()}
    return pick_each(named_parameters(model), {name: globs for name, globs in params.items() if globs})


def _without_gradient(gradients: Mapping[str, Tensor | None]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parameters without a gradient, and those whose gradient is 0."""
    none = tuple(name for name, gradient in gradients.items() if gradient is None)
    given = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    return none, tuple(name for name, gradient in given.items() if not gets_gradient(gradient))


def _modules(model: nn.Module, rows: Iterable[PlanRow]) -> tuple[PlanModule, ...]:
    """Return the model's modules with the policies on each."""
    owners = {row.name: {key.rpartition(".")[0] for key in row.parameters} for row in rows}
    matched = {row.name: {*row.modules, *owners[row.name]} for row in rows}
    return tuple(
        PlanModule(
            name=plain_name(raw_name),
            type=type(module).__name__,
            parameters=sum(parameter.numel() for parameter in module.parameters(recurse=False)),
            policies=tuple(name for name, names in matched.items() if plain_name(raw_name) in names),
        )
        for raw_name, module in model.named_modules()
    )


# ---- the copy, and its optimizers


def _duplicate(model: nn.Module, flow: Mapping[str, FlowPolicy]) -> nn.Module:
    """Return a copy of the model without these policies, and with ``requires_grad`` on again."""
    duplicate = copy.deepcopy(model)
    deactivate(duplicate, flow.values())
    for original, copied in zip(model.parameters(), duplicate.parameters(), strict=True):
        if is_turned_off(original):
            copied.requires_grad_(True)
    return duplicate


def _optimizers(duplicate: nn.Module, given: Optimizers | None) -> list[torch.optim.Optimizer]:
    """Return the given optimizers, or those of a LightningModule."""
    if given is not None:
        return [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    configure: Any = getattr(duplicate, "configure_optimizers", tuple)
    try:
        made = configure()
    except Exception:
        # Some modules need a Trainer, which does not exist yet; the plan works without optimizers.
        return []
    return [each for each in tree_leaves(made) if isinstance(each, torch.optim.Optimizer)]


# ---- flow policies: one step for training, one for the policies of other phases


def _flow_rows(
    model: nn.Module, policies: Mapping[str, FlowPolicy], step: Step
) -> tuple[dict[str, PlanRow], dict[str, Tensor | None], list[str], set[str]]:
    """Return the rows, the gradients, lines on operations that did not run, and the policies that acted."""
    training = {name for name, policy in policies.items() if "fit" in policy.when.phases}
    gradients, rows, unmet, acting = _observe(model, policies, training, step)
    others = set(policies) - training
    if others:
        _, rows_of_others, unmet_by_others, acting_others = _observe(model, policies, others, step)
        rows.update({name: rows_of_others[name] for name in others})
        unmet += unmet_by_others
        acting |= acting_others
    return rows, gradients, unmet, acting


def _observe(
    model: nn.Module, policies: Mapping[str, FlowPolicy], active: set[str], step: Step
) -> tuple[dict[str, Tensor | None], dict[str, PlanRow], list[str], set[str]]:
    """Do one step with some of the policies active."""
    parameters = _trainable(model)
    entry_point = "training_step" if hasattr(model, "training_step") else "forward"
    installed = install(model, policies, entry_points={"": [entry_point]})
    try:
        for name in policies:
            installed.set_active(name, name in active)
        loss = step(model)
        found = _gradients(loss, parameters)
        report = {row.name: row for row in installed.report().rows}
    finally:
        installed.remove(quiet=True)
    # An operation without a gradient may get one when layers before it thaw.
    thaws = any(not parameter.requires_grad for parameter in model.parameters())
    lines = []
    for name in [name for name in policies if name in active]:
        lines += [f"{name}: cannot see into {call}: {why}" for call, why in report[name].opaque_calls.items()]
        message = check_operations(report[name], may_get_gradient=thaws)
        lines += [f"{name}: {message}"] if message else []
    rows = {name: _flow_row(name, policies[name], report[name]) for name in policies}
    return found, rows, lines, {name for name in active if report[name].matched}


def _gradients(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    if not (loss.requires_grad and parameters):
        return dict.fromkeys(parameters)
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, found, strict=True))


def _flow_row(name: str, policy: FlowPolicy, row: "ReportRow") -> PlanRow:
    return PlanRow(
        name=name,
        policy=type(policy).__name__,
        what=type(policy).__name__,
        where=row.where,
        modules=row.modules if policy.modules else (),
        operations=dict(row.matched) if policy.ops else {},
        parameters=row.parameters,
        phases=policy.when.phases,
        when=_moments(policy.when),
    )


def _check_cuts(
    policies: Mapping[str, FlowPolicy],
    rows: Mapping[str, PlanRow],
    gradients: Mapping[str, Tensor | None],
    masks: Mapping[str, Mapping[str, Any]],
) -> None:
    """Check that the stops leave a path to an active parameter.

    Raises:
        PolicyError: If they do not.
    """
    frozen = {key for given in masks.values() for key, mask in given.items() if mask is False}
    if gradients and not any(g is not None and name not in frozen for name, g in gradients.items()):
        check_cuts({name: policy for name, policy in policies.items() if "fit" in rows[name].phases})


def _cuts(policies: Mapping[str, FlowPolicy], rows: Mapping[str, PlanRow]) -> tuple[str, ...]:
    return tuple(
        f"{rows[name].where} ({name}{', exact zeros' if policy.mode == 'zero' else ''})"
        for name, policy in policies.items()
        if isinstance(policy, Stop)
    )


# ---- freeze policies: the masks of their first step


def _freeze_masks(
    policies: Mapping[str, Freeze] | Mapping[str, ForwardMask],
    matched: Mapping[str, Mapping[str, nn.Parameter]],
    duplicate: nn.Module,
    gradients: Mapping[str, Tensor | None],
    seed: int,
) -> tuple[dict[str, MaskSource], dict[str, dict[str, Any]]]:
    """Return each policy's mask source, set up, and its masks at its first step.

    Raises:
        PolicyError: If a source cannot mask the parameters of its policy, or policies disagree on the state.
    """
    sources: dict[str, MaskSource] = {}
    masks: dict[str, dict[str, Any]] = {}
    policies_of: dict[str, dict[str, Freeze]] = {}
    for name, policy in policies.items():
        if isinstance(policy, Freeze):
            for key in matched[name]:
                policies_of.setdefault(key, {})[name] = policy
        with under(f"policy.{name}"):
            sources[name] = copy.deepcopy(policy.mask)
            sources[name].model = duplicate
            copies = named_parameters(duplicate)
            sources[name].setup({key: copies[key] for key in matched[name]}, seed=seed)
            masks[name] = _first_masks(sources[name], policy.when, gradients)
    for key, holders in policies_of.items():
        check_same_options(key, holders)
    return sources, masks


def _first_masks(source: MaskSource, when: When, gradients: Mapping[str, Tensor | None]) -> dict[str, Any]:
    if source.needs_gradients:
        known = {name: gradients.get(name) for name in source.parameters}
        source.observe({name: gradient for name, gradient in known.items() if gradient is not None})
    step, epoch = (when.start, 0) if when.unit == "step" else (0, when.start)
    return dict(source.masks(step, epoch))


def _budget(
    source: MaskSource, gradients: Mapping[str, Tensor | None], step: Callable[[], object]
) -> dict[str, float]:
    """Return the parameters' shares of what a source would choose by one step, the largest first."""
    if not isinstance(source, TopK) or any(p.is_meta for p in source.parameters.values()):
        return {}
    if "activation_norm" in source.score.asks and source.needs_gradients:
        step()
    known = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    chosen = source.preview({name: known[name] for name in source.parameters if name in known})
    source.release()
    counts = {
        name: active_entries(mask, source.parameters[name].shape) for name, mask in (chosen or {}).items()
    }
    total = max(sum(counts.values()), 1)
    shares = {name: count / total for name, count in counts.items()}
    return dict(sorted(shares.items(), key=lambda each: -each[1]))


def _partly_frozen(
    policies: Mapping[str, Freeze], masks: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, bool]]:
    """Return the parameters that each policy freezes in part, and True if frozen entries lose their state."""
    return {
        name: {
            key: policy.frozen_state != "keep"
            for key, mask in masks[name].items()
            if 0.0 < mask_share(mask) < 1.0 and getattr(mask, "level", None) != "tensor"
        }
        for name, policy in policies.items()
    }


def _frozen_tensors(
    masks: Mapping[str, Mapping[str, Any]], sources: Mapping[str, MaskSource]
) -> dict[str, set[str]]:
    """Return the parameters that each policy freezes as a whole, at its first step or later."""
    return {
        name: {key for key, mask in given.items() if mask_share(mask) == 0.0} | sources[name].may_freeze()
        for name, given in masks.items()
    }


def _freeze_row(
    name: str,
    policy: Freeze,
    parameters: Mapping[str, nn.Parameter],
    source: MaskSource,
    masks: Mapping[str, Any],
    vain: Collection[str],
) -> PlanRow:
    entries = sum(parameter.numel() for parameter in parameters.values())
    active = {
        key: parameter.numel() * mask_share(masks.get(key, True)) for key, parameter in parameters.items()
    }
    training = sum(count for key, count in active.items() if key not in vain)
    return PlanRow(
        name=name,
        policy=type(policy).__name__,
        what=f"Freeze · {type(policy.mask).__name__}",
        where=f"params {', '.join(policy.params)}",
        parameters=tuple(parameters),
        entries=entries,
        active_share=sum(active.values()) / max(entries, 1),
        training_share=training / max(entries, 1),
        groups=tuple(group.name for group in source.layer_groups),
        phases=policy.when.phases,
        when=_moments(policy.when),
        course=f"{_described(policy.mask)} {_timetable(policy.mask)}; {FATES[policy.frozen_state]}",
    )


def _forward_row(
    name: str, policy: ForwardMask, parameters: Mapping[str, nn.Parameter], masks: Mapping[str, Any]
) -> PlanRow:
    entries = sum(parameter.numel() for parameter in parameters.values())
    seen = sum(p.numel() * mask_share(masks.get(key, True)) for key, p in parameters.items())
    return PlanRow(
        name=name,
        policy=type(policy).__name__,
        what=f"ForwardMask · {type(policy.mask).__name__}",
        where=f"params {', '.join(policy.params)}",
        parameters=tuple(parameters),
        phases=policy.when.phases,
        when=_moments(policy.when),
        course=f"{_described(policy.mask)} {_timetable(policy.mask)}; the forward pass sees "
        f"{seen / max(entries, 1):.1%} of {entries:,} entries, and all train",
    )


def _rates_row(name: str, policy: Rates, parameters: Mapping[str, nn.Parameter]) -> PlanRow:
    with under(f"policy.{name}.params"):
        course = policy.course(parameters)
    return PlanRow(
        name=name,
        policy=type(policy).__name__,
        what=type(policy).__name__,
        where=f"params {', '.join(policy.params)}",
        parameters=tuple(parameters),
        phases=policy.when.phases,
        when=_moments(policy.when),
        course=course,
    )


def _described(source: MaskSource) -> str:
    """Return a description of a source with its own arguments, without its timetable."""
    arguments = (f"{key}={value}" for key, value in source.describe().items())
    return f"{type(source).__name__}({', '.join(arguments)})"


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


def mask_share(mask: Any) -> float:
    """Return the active share of a mask; the expected share of a random mask."""
    if isinstance(mask, bool):
        return float(mask)
    if isinstance(mask, Tensor):
        return 1.0 if mask.is_meta else mask.float().mean().item()
    return float(mask.density)


def _share(parameter: Tensor, masks: Mapping[str, Mapping[str, Any]], key: str) -> float:
    """Return the active share of a parameter under all policies together."""
    chosen = [given[key] for given in masks.values() if key in given]
    if len(chosen) < 2 or parameter.is_meta:
        return math.prod(mask_share(mask) for mask in chosen)
    shape, device = parameter.shape, parameter.device
    return mask_share(functools.reduce(lambda one, other: intersect(one, other, shape, device), chosen))


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    named = model.named_parameters()
    return {plain_name(name): parameter for name, parameter in named if parameter.requires_grad}


def _cuda_devices(model: nn.Module) -> list[int]:
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    return sorted(device.index for device in devices if device.index is not None)
