"""What masks mean for an optimizer without an update rule, found by a few steps of another of its class."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, under
from gradpolicy.optim.initial_state import needs_closure, reset_state, stand_in_optimizer
from gradpolicy.optim.update_rules import rule_for

# By parts of a class's name: what a few steps of a small tensor need not show.
_MIXING = re.compile(
    "adafactor|came|dadapt|galore|kron|lamb|lars|muon|prodigy|shampoo|sm3|soap", re.IGNORECASE
)
_ROTATED = re.compile("soap", re.IGNORECASE)
_QUANTISED = re.compile("4bit|8bit|fp8|quantized", re.IGNORECASE)
_WHY_REFUSED = {
    "rotated": "keeps its moments in a rotated basis",
    "quantised": "keeps one scale for a block of entries in its state",
}
_STEPS = 12


@dataclass(frozen=True)
class Behaviour:
    """How an optimizer moves the entries of a tensor.

    Attributes:
        mixes_entries: True if an entry's update depends on the gradients of others.
        counts_steps: True if an entry whose state is emptied moves otherwise than at a first step.
        state: "rotated" or "quantised" where its state has no value for each entry; else empty.
    """

    mixes_entries: bool
    counts_steps: bool
    state: str = ""


_WARNED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_KNOWN: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, Behaviour | None]] = (
    weakref.WeakKeyDictionary()
)


def behaviour_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> Behaviour | None:
    """Return how an optimizer without an update rule moves entries; None where no step could be tried."""
    known = _KNOWN.setdefault(optimizer, {})
    dimensions = min(parameter.dim(), 4)
    if dimensions not in known:
        known[dimensions] = _try_steps(optimizer, group, parameter)
    return known[dimensions]


def put_back_remark(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, forgets: bool
) -> str:
    """Return what "frozen entries are put back" means for a mask on some entries of a parameter.

    Args:
        optimizer: An optimizer without an update rule.
        group: The parameter's param group.
        parameter: The parameter.
        forgets: True if an entry that freezes loses its state.
    """
    behaviour, kind = behaviour_of(optimizer, group, parameter), type(optimizer).__name__
    stepped = f"{kind} steps whole tensors, and frozen entries are put back afterwards: "
    if behaviour is None or behaviour.mixes_entries:
        state = "" if forgets else " and with what it keeps of them from earlier steps"
        return (
            f"{stepped}active entries move as in a step with zeros for frozen gradients{state}; to move each "
            "as if alone, freeze whole tensors, or train with AdamW or SGD"
        )
    if behaviour.counts_steps and forgets:
        return (
            f"{stepped}it counts steps by tensor, so that an entry that thaws starts with empty state and an "
            "old count; to start afresh, describe it by gradpolicy.update_rule, or train with AdamW"
        )
    return ""


def check_entries_can_freeze(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> None:
    """Makes sure that some entries of a parameter can be put back while others train.

    Raises:
        PolicyError: If the optimizer's state has no value for each entry.
    """
    behaviour = behaviour_of(optimizer, group, parameter)
    if behaviour is not None and behaviour.state:
        raise _refused(optimizer, behaviour.state)
    check_state_of_entries(optimizer, parameter)


def check_state_of_entries(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Makes sure that no state of a parameter is quantised.

    Raises:
        PolicyError: If some is.
    """
    if _is_quantised(optimizer.state.get(parameter, {})):
        raise _refused(optimizer, "quantised")


def _refused(optimizer: torch.optim.Optimizer, state: str) -> PolicyError:
    return PolicyError(
        f"{type(optimizer).__name__} {_WHY_REFUSED[state]}, so that the state of frozen entries cannot be "
        "put back alone; freeze whole tensors (level: tensor), or train with one that is exact, such as AdamW"
    )


def _is_quantised(state: Mapping[str, Any]) -> bool:
    tensors = (value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)
    return any(value.element_size() == 1 and value.dtype != torch.bool for value in tensors)


def warn_of_putting_back(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, forgets: bool
) -> None:
    """Warns, once for an optimizer, of what a mask on some entries of a parameter means."""
    remark = put_back_remark(optimizer, group, parameter, forgets)
    if remark and optimizer not in _WARNED:
        _WARNED.add(optimizer)
        warnings.warn(remark, stacklevel=6)


def put_back_remarks(
    masks: Mapping[str, Mapping[str, bool]], parameters: Mapping[str, Tensor], optimizers: Any
) -> Iterator[str]:
    """Yield a line for each policy on some entries of parameters whose optimizer has no update rule.

    Args:
        masks: For each policy, the parameters that its masks freeze in part, and whether these lose state.
        parameters: The parameters by name.
        optimizers: The optimizers.

    Raises:
        PolicyError: If some entries of a parameter cannot be frozen alone.
    """
    places = {
        id(parameter): (own, group)
        for optimizer in optimizers
        if rule_for(own := getattr(optimizer, "inner", optimizer)) is None
        for group in own.param_groups
        for parameter in group["params"]
    }
    for policy, names in masks.items():
        remarks: dict[str, None] = {}
        for name, forgets in names.items():
            if (place := places.get(id(parameters[name]))) is not None:
                with under(f"policy.{policy}"):
                    check_entries_can_freeze(*place, parameters[name])
                remarks[put_back_remark(*place, parameters[name], forgets)] = None
        yield from (f"{policy}: {remark}" for remark in remarks if remark)


def _try_steps(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> Behaviour | None:
    names = " ".join(kind.__name__ for kind in type(optimizer).__mro__)
    for state, pattern in (("rotated", _ROTATED), ("quantised", _QUANTISED)):
        if pattern.search(names):
            return Behaviour(mixes_entries=True, counts_steps=True, state=state)
    if needs_closure(optimizer):
        return Behaviour(mixes_entries=True, counts_steps=True)
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            found = _behaviour(optimizer, group, parameter)
            return replace(found, mixes_entries=found.mixes_entries or bool(_MIXING.search(names)))
    except Exception:
        # A stranger's constructor or step may want anything.
        return None


def _behaviour(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> Behaviour:
    shape = (4,) * min(parameter.dim(), 4)
    torch.manual_seed(0)
    kind: dict[str, Any] = {"device": parameter.device, "dtype": parameter.dtype}
    start, own, others = torch.ones(shape, **kind), *torch.randn(2, _STEPS, *shape, **kind)
    others.view(_STEPS, -1)[:, 0] = own.view(_STEPS, -1)[:, 0]
    stepped, plain = _after(optimizer, group, start, own)
    _, changed = _after(optimizer, group, start, others)
    # Compared by how far it moved: beside its value a small learning rate would hide any difference.
    moved, moved_otherwise = ((each.detach() - start).flatten()[0] for each in (plain, changed))
    mixes = parameter.dim() > 0 and not _close(moved, moved_otherwise)
    if _is_quantised(stepped.state[plain]):
        return Behaviour(mixes, counts_steps=True, state="quantised")
    # A fresh step from where the first optimizer is, beside a step of that one with its state emptied.
    before = plain.detach().clone()
    _, fresh = _after(optimizer, group, before, own[:1])
    reset_state(stepped, stepped.param_groups[0], plain, stepped.state[plain])
    plain.grad = own[0].clone()
    stepped.step()
    return Behaviour(mixes, counts_steps=not _close(plain.detach() - before, fresh.detach() - before))


def _after(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], start: Tensor, gradients: Tensor
) -> tuple[torch.optim.Optimizer, Tensor]:
    """Return another optimizer of the class, and a tensor after its steps with these gradients."""
    moved = start.clone().requires_grad_()
    torch.manual_seed(0)
    other = stand_in_optimizer(optimizer, group, moved)
    for gradient in gradients:
        moved.grad = gradient.clone()
        other.step()
    return other, moved


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.detach(), other.detach(), rtol=1e-3, atol=1e-8)
