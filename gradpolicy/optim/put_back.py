"""Frozen entries of a full tensor's step: put back afterwards, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim.other_optimizers import check_state_of_entries, entry_state, initial_values
from gradpolicy.optim.shapes import local_entries


def mask_gradient(masked: Any, gradient: Tensor) -> None:
    """Zero the gradient of frozen entries in place, including NaN and infinity."""
    masked.follow()
    if 0 in gradient.stride() and gradient.numel() > 1:
        # Entries that share memory, as expanded ones do, cannot be written to.
        masked.parameter.grad = gradient = gradient.clone(memory_format=torch.contiguous_format)
    local_entries(gradient).masked_fill_(~masked.ages.mask, 0.0)


def save_frozen(masked: Any) -> dict[str, Tensor]:
    """Zero the gradients of frozen entries before a step, and return copies of what the step may change.

    Returns:
        The state of entries by name; "" is the parameter.
    """
    values: dict[str, Any] = masked.follow()
    if masked.ages.active:
        check_state_of_entries(masked.state.wrapped.optimizer, values)
    if masked.parameter.grad is not None:
        mask_gradient(masked, masked.parameter.grad)
    saved = {"": masked.parameter, **entry_state(values, masked.parameter)}
    return {key: local_entries(tensor).clone() for key, tensor in saved.items()}


def restore_frozen(masked: Any, saved: Mapping[str, Tensor]) -> None:
    """Put frozen entries and their state back after the step."""
    own = entry_state(masked.state.values, masked.parameter)
    for key, tensor in {"": masked.parameter, **own}.items():
        if key in saved:
            _fill_frozen(masked, tensor, saved[key])
    _reset(masked, {key: tensor for key, tensor in own.items() if key not in saved})


def reset_frozen(masked: Any) -> None:
    """Set the state of frozen entries to its initial values, if these are known."""
    _reset(masked, entry_state(masked.state.values, masked.parameter))


def _reset(masked: Any, state: Mapping[str, Tensor]) -> None:
    optimizer, parameter = masked.state.wrapped.optimizer, masked.parameter
    for key, start in initial_values(optimizer, masked.group, parameter, state).items():
        value = local_entries(start.to(state[key].dtype)) if start.dim() else start.to(state[key].device)
        _fill_frozen(masked, state[key], value)


def _fill_frozen(masked: Any, tensor: Tensor, values: Tensor) -> None:
    entries = local_entries(tensor)
    entries.copy_(torch.where(masked.ages.mask, entries, values.to(entries.dtype)))
