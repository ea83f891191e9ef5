"""The plan: what each policy affects, determined by one step on a copy."""

import inspect
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gradpolicy.errors import PolicyError, shortened, shown
from gradpolicy.flow.install import name_policies
from gradpolicy.flow.policy_checks import check_cuts
from gradpolicy.freezing.bound_policy import masks_never_change
from gradpolicy.freezing.combination import combine
from gradpolicy.planning.first_step import FirstStep, Optimizers, Step, first_step, of_kind
from gradpolicy.planning.plan_rows import row_of
from gradpolicy.planning.plan_table import Plan
from gradpolicy.policies import FlowPolicy, Freeze, Policy, Stop, Train
from gradpolicy.rates import Rates, at, combined
from gradpolicy.tensors.mask import Mask, active_share
from gradpolicy.what_trains import Layers, what_trains
from gradpolicy.where import named_parameters, pick_each


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
    matched = _matched(model, policies)
    found = first_step(model, policies, matched, step, seed=seed, optimizers=optimizers)
    gradients = found.gradients
    vain = _trained_in_vain(policies, matched, gradients)
    masks = _first_masks(policies, found)
    _check_cuts(policies, gradients, masks)
    layers = _layers(model, policies, matched, found, masks)
    if all(masks_never_change(policy) for policy in of_kind(policies, Freeze).values()):
        layers.check()
    rows = tuple(
        row_of(name, policy, matched.get(name, {}), found, vain.get(name, ()))
        for name, policy in policies.items()
    )
    without, zero = _without_gradient(gradients)
    return Plan(
        rows=rows,
        entries=sum(parameter.numel() for parameter in found.parameters.values()),
        training_entries=_training_entries(found, masks),
        cuts=_cuts(policies, found),
        without_gradient=without,
        zero_gradient=zero,
        warnings=(*_vain_warnings(vain, matched, gradients), *found.warnings),
        layers=layers,
    )


def _layers(
    model: nn.Module,
    policies: Mapping[str, Policy],
    matched: Mapping[str, Mapping[str, Tensor]],
    found: FirstStep,
    masks: Mapping[str, Mask],
) -> Layers:
    """Return what trains in the first step, layer by layer."""
    freeze = {name: each for name, each in of_kind(policies, Freeze).items() if each.when.active()}
    settings = [found.sources[name].settings(0, 0) for name in freeze]
    settings += [
        {key: at(own, each.when.count(0, 0)) for key, own in each.settings_of(matched[name]).items()}
        for name, each in of_kind(policies, Rates).items()
        if each.when.active()
    ]
    together: dict[str, Any] = {}
    for own in settings:
        together |= {key: combined(together.get(key, {}), given) for key, given in own.items()}
    return what_trains(
        named_parameters(model),
        {name: active_share(mask) for name, mask in masks.items()},
        factors={name: own["lr"] for name, own in together.items() if "lr" in own},
        still={
            key
            for name, each in freeze.items()
            for key in found.masks[name]
            if each.buffers != "move" and masks.get(key) is False
        },
        matched={key for name in of_kind(policies, Freeze) for key in matched[name]},
        trains_only_matched=any(isinstance(each, Train) for each in freeze.values()),
    )


def _first_masks(policies: Mapping[str, Policy], found: FirstStep) -> dict[str, Mask]:
    """Return the mask of each parameter in the first step, under all policies that are active in it."""
    active = {name: each for name, each in of_kind(policies, Freeze).items() if each.when.active()}
    return {
        key: combine(
            [(each, found.masks[name][key]) for name, each in active.items() if key in found.masks[name]],
            parameter,
        )
        for key, parameter in found.parameters.items()
    }


def _training_entries(found: FirstStep, masks: Mapping[str, Mask]) -> int:
    """Return the number of entries that get a gradient and are active in the first step."""
    getting = {name: each for name, each in found.parameters.items() if _gets_gradient(found.gradients[name])}
    return round(sum(each.numel() * active_share(masks[name]) for name, each in getting.items()))


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
    return none, tuple(name for name, gradient in given.items() if not _gets_gradient(gradient))


def _check_cuts(
    policies: Mapping[str, Policy],
    gradients: Mapping[str, Tensor | None],
    masks: Mapping[str, Mask],
) -> None:
    """Check that the stops leave a path to an active parameter.

    Raises:
        PolicyError: If they do not.
    """
    frozen = {name for name, mask in masks.items() if mask is False}
    if gradients and not any(g is not None and name not in frozen for name, g in gradients.items()):
        flow = of_kind(policies, FlowPolicy)
        check_cuts({name: policy for name, policy in flow.items() if "fit" in policy.when.phases})


def _cuts(policies: Mapping[str, Policy], found: FirstStep) -> tuple[str, ...]:
    return tuple(
        f"{found.report[name].where} ({name}{', exact zeros' if policy.mode == 'zero' else ''})"
        for name, policy in of_kind(policies, Stop).items()
        if found.report[name].matched
    )


# ---- parameters that get no gradient


def _trained_in_vain(
    policies: Mapping[str, Policy],
    matched: Mapping[str, Iterable[str]],
    gradients: Mapping[str, Tensor | None],
) -> dict[str, tuple[str, ...]]:
    """Return the parameters of each policy that get no gradient, or only zeros, even if they are active.

    Args:
        policies: The policies by name.
        matched: The names of the parameters that each matches, by the policy's name.
        gradients: The gradients by the parameters' names.
    """
    return {
        name: tuple(key for key in keys if not _gets_gradient(gradients.get(key)))
        for name, keys in matched.items()
        # A stop is meant to give its parameters no gradient.
        if not isinstance(policies[name], Stop)
    }


def _gets_gradient(gradient: Tensor | None) -> bool:
    """Return True if there is a gradient that is not zero in every entry."""
    return gradient is not None and (gradient.is_meta or bool(gradient.any()))


def _vain_warnings(
    vain: Mapping[str, tuple[str, ...]],
    matched: Mapping[str, Collection[str]],
    gradients: Mapping[str, Tensor | None],
) -> Iterator[str]:
    """Yield a line for each policy on parameters that get no gradient."""
    for name, without in vain.items():
        count = len(matched[name])
        # No warning if the user has turned off the gradient of some of them.
        named = without if len(without) == count else [key for key in without if key in gradients]
        if not named:
            continue
        if len(named) == count:
            what = f"none of its {count} parameters gets a gradient"
        else:
            what = (
                f"{len(named)} of its {count} parameters {'gets' if len(named) == 1 else 'get'} no gradient"
            )
        zeros = any(gradients.get(key) is not None for key in named)
        why = (
            "a rounding or another step before the loss passes only zeros, unless a policy such as "
            "straight_through gives it a gradient"
            if zeros
            else "the loss does not depend on them, or a stop or detach lies in between"
        )
        yield f"{name}: {what} ({shortened(list(named))}): {why}"
