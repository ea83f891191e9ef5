"""Optimizers without an update rule: they step, then frozen entries are put back exactly.

The state of torch's own optimizers begins at 0, with few exceptions. The initial state of a third party's is
found by a first step of another optimizer of its class: some state begins as the parameter.
"""

from __future__ import annotations

import inspect
import re
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, under, warn_user
from gradpolicy.optim.parameter_state import ParameterState
from gradpolicy.optim.shapes import fill_frozen, local_entries
from gradpolicy.optim.update_rules import Group, is_torchs_own, rule_for
from gradpolicy.tensors.sharding import is_composed

OF_THE_TENSOR = ("step", "mu_product", "eta", "mu")
"""State that torch's optimizers keep once per tensor, even if the tensor is a scalar."""
_QUANTISED = "keeps one scale for a block of entries in its state"
_REFUSED = {
    "soap": "keeps its moments in a rotated basis",
    "shampoo": "keeps statistics that mix all rows and all columns",
    "4bit|8bit|fp8|quantized": _QUANTISED,
}
"""Parts of the names of optimizers whose state has no value for each entry, with the reason."""


_WARNED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


# --- the state of such an optimizer


def entry_state(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return the part of a parameter's state that has a value (not a flag) for each of its entries."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.dtype != torch.bool
        and not is_composed(value)
        and (value.dim() or key not in OF_THE_TENSOR)
    }


def first_state(optimizer: torch.optim.Optimizer, group: Group, parameter: Tensor) -> dict[str, Any] | None:
    """Return the state that another optimizer of the class creates in a step with gradient 0.

    Returns:
        The state; None where another optimizer cannot be made: a third party's may need anything.
    """
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    stand_in = parameter.detach().clone().requires_grad_()
    stand_in.grad = torch.zeros_like(stand_in)
    kind, still = type(optimizer), {"weight_decay": 0.0} if "weight_decay" in group else {}
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accepted = inspect.signature(kind).parameters
            settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
            other: Any = kind([{**own, **still, "params": [stand_in]}], **settings)
            if callable(getattr(other, "train", None)):
                other.train()
            other.step()
            return dict(other.state[stand_in])
    except Exception:
        return None


# --- around a step


def mask_gradient(masked: ParameterState, gradient: Tensor) -> None:
    """Zero the gradient of frozen entries in place, including NaN and infinity."""
    masked.follow()
    if 0 in gradient.stride() and gradient.numel() > 1:
        # Entries that share memory, as expanded ones do, cannot be written to.
        masked.parameter.grad = gradient = gradient.clone(memory_format=torch.contiguous_format)
    fill_frozen(local_entries(gradient), masked.ages.mask, 0.0)


def save_frozen(masked: ParameterState) -> dict[str, Tensor]:
    """Return copies of what a step may change, and have frozen entries count as nothing in it.

    Their gradients become 0, and with torch's own optimizers their state what it begins as.

    Returns:
        The state of entries by name; "" is the parameter.
    """
    values: dict[str, Any] = masked.follow()
    if masked.ages.active:
        check_state_of_entries(masked.wrapped.optimizer, values)
    if masked.parameter.grad is not None:
        mask_gradient(masked, masked.parameter.grad)
    own = {"": masked.parameter, **entry_state(values, masked.parameter)}
    saved = {key: local_entries(tensor).clone() for key, tensor in own.items()}
    if is_torchs_own(masked.wrapped.optimizer):
        reset_frozen(masked)
    return saved


def restore_frozen(masked: ParameterState, saved: Mapping[str, Tensor]) -> None:
    """Put frozen entries and their state back after the step."""
    own = entry_state(masked.values, masked.parameter)
    for key, tensor in {"": masked.parameter, **own}.items():
        if key in saved:
            _fill_frozen(masked, tensor, saved[key])
    reset_frozen(masked, saved.keys())


def reset_frozen(masked: ParameterState, kept: Collection[str] = ()) -> None:
    """Set the state of frozen entries, except for some, to its initial values, if these are known."""
    optimizer, parameter, first = masked.wrapped.optimizer, masked.parameter, {}
    state = entry_state(masked.values, parameter)
    state = {key: value for key, value in state.items() if key not in kept}
    if state and not is_torchs_own(optimizer):
        if (found := first_state(optimizer, masked.group, parameter)) is None:
            return
        first = entry_state(found, parameter)
    for key, value in state.items():
        rate = isinstance(optimizer, torch.optim.Rprop) and key == "step_size"
        start = float(masked.group["lr"]) if rate else 0.0
        number = torch.tensor(start, dtype=torch.float64, device=value.device)
        _fill_frozen(masked, value, local_entries(first[key]) if key in first else number)


def _fill_frozen(masked: ParameterState, tensor: Tensor, values: Tensor) -> None:
    entries = local_entries(tensor)
    entries.copy_(torch.where(masked.ages.mask, entries, values.to(entries.dtype)))


# --- masks on some entries


def check_state_of_entries(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Check that no state of a parameter is quantised.

    Raises:
        PolicyError: If some is.
    """
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]
    if any(is_composed(each) or (each.element_size() == 1 and each.dtype != torch.bool) for each in tensors):
        raise _refused(optimizer, _QUANTISED)


def _refused(optimizer: torch.optim.Optimizer, why: str) -> PolicyError:
    return PolicyError(
        f"{type(optimizer).__name__} {why}, so that the state of frozen entries cannot be "
        "put back alone; freeze full tensors (level: tensor), or train with one that is exact, such as AdamW"
    )


def put_back_remark(optimizer: torch.optim.Optimizer, group: Group, parameter: Tensor) -> str:
    """Return a remark on masks on some entries of a parameter whose optimizer has no update rule.

    Args:
        optimizer: The optimizer.
        group: The parameter's param group.
        parameter: The parameter.

    Raises:
        PolicyError: If the optimizer's state has no value for each entry, which could be put back.
    """
    names = " ".join(kind.__name__ for kind in type(optimizer).__mro__)
    for pattern, why in _REFUSED.items():
        if re.search(pattern, names, re.IGNORECASE):
            raise _refused(optimizer, why)
    state = optimizer.state.get(parameter)
    if not state and not is_torchs_own(optimizer):
        state = first_state(optimizer, group, parameter)
    check_state_of_entries(optimizer, state or {})
    zeros = "frozen gradients and state" if is_torchs_own(optimizer) else "frozen gradients alone"
    return (
        f"{type(optimizer).__name__} steps full tensors, and frozen entries are put back afterwards: what "
        f"it computes from several entries takes zeros for {zeros}, and a step count is the full tensor's, "
        "also for an entry that thaws with empty state; to move active entries as if alone, freeze full "
        "tensors, describe the optimizer by gradpolicy.update_rule, or train with AdamW"
    )


def warn_of_putting_back(masked: ParameterState) -> None:
    """Warn, once per optimizer, of the effects of a mask on some entries; see :func:`put_back_remark`."""
    optimizer = masked.wrapped.optimizer
    remark = put_back_remark(optimizer, masked.group, masked.parameter)
    if optimizer not in _WARNED:
        _WARNED.add(optimizer)
        warn_user(remark)


def put_back_remarks(
    frozen: Mapping[str, Iterable[str]], parameters: Mapping[str, Tensor], optimizers: Any
) -> Iterator[str]:
    """Yield a remark for each policy on some entries of parameters whose optimizer has no update rule.

    Args:
        frozen: For each policy, the names of parameters of which it freezes some entries.
        parameters: The parameters by name.
        optimizers: The optimizers, which are not wrapped.

    Raises:
        PolicyError: If some entries of a parameter cannot be frozen alone.
    """
    places = {
        parameter: (optimizer, group)
        for optimizer in optimizers
        if rule_for(optimizer) is None
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for policy, names in frozen.items():
        some = [parameters[name] for name in names]
        with under(f"policy.{policy}"):
            remarks = dict.fromkeys(put_back_remark(*places[each], each) for each in some if each in places)
        yield from (f"{policy}: {remark}" for remark in remarks)
