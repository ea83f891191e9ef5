"""The step with which `torch.distributed.checkpoint` finds out what state an optimizer keeps.

Before the first step it sets all gradients and learning rates to 0 and calls `step`. That must not count as
an update or change the first one: some state is initialised from the learning rate or the first gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.other_optimizers import entry_state, initial_values, reset_state
from gradpolicy.optim.update_rules.base import step_count
from gradpolicy.optim.wrapped import Wrapped
from gradpolicy.tensors.sharding import local_shard


def is_probe(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the next step is an optimizer's first and all rates and gradients are 0."""
    groups = optimizer.param_groups
    if optimizer.state or not all("lr" in group and float(group["lr"]) == 0 for group in groups):
        return False
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return bool(gradients) and not any(bool(gradient.count_nonzero()) for gradient in gradients)


def probe(wrapped: Wrapped, masked: Iterable[MaskedParameter]) -> None:
    """Create the state of every parameter without counting an update.

    Args:
        wrapped: The wrapped optimizer.
        masked: Its masked parameters.
    """
    optimizer, parameters = wrapped.optimizer, wrapped.parameters()
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    values = [local_shard(parameter.detach()).clone() for parameter in parameters]
    optimizer.step()
    for parameter, value in zip(parameters, values, strict=True):
        # A step of size 0 may turn -0 into 0, and into NaN if eps is too small for half precision.
        local_shard(parameter.detach()).copy_(value)
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        _restart_count(group)
        group.update(before)
    for parameter in parameters:
        state = wrapped.state_of(parameter)
        # The momentum of SGD now contains weight decay.
        reset_state(optimizer, wrapped.group_of(parameter), parameter, state)
        _restart_count(state)
    # If the optimizer keeps no state, ages stay: the probe has not created anything.
    for each in masked:
        if each.state.values:
            each.adopt_state(updates=0)


def forget(wrapped: Wrapped, masked: dict[Tensor, MaskedParameter], closure: bool) -> None:
    """Remove the state that a probe created, for parameters whose first update is the next.

    Args:
        wrapped: The wrapped optimizer.
        masked: Its masked parameters.
        closure: True if the update computes the gradients; else only parameters that have one are updated.
    """
    for parameter in wrapped.parameters():
        if (closure or parameter.grad is not None) and not has_begun(
            wrapped, parameter, masked.get(parameter)
        ):
            wrapped.optimizer.state.pop(parameter, None)


def has_begun(wrapped: Wrapped, parameter: Tensor, masked: MaskedParameter | None = None) -> bool:
    """Return True if a parameter has been updated, as far as this process knows."""
    if masked is not None and masked.rule is not None:
        # Other processes may advance the tensor's count, but not the age of an entry.
        return (masked.updates if masked.options.bias_correction == "tensor" else masked.ages.oldest) > 0
    state = wrapped.state_of(parameter)
    own = entry_state(state, parameter)
    starts = initial_values(wrapped.optimizer, wrapped.group_of(parameter), parameter, own)
    # A rate that state begins with is 0 while torch finds out what state there is.
    starts = {key: start for key, start in starts.items() if start.dim() or not start}
    moved = (bool((local_shard(own[key]) != local_shard(start)).any()) for key, start in starts.items())
    return step_count(state) > 0 or any(moved)


def _restart_count(state: dict[str, Any]) -> None:
    if isinstance(state.get("step"), Tensor):
        state["step"].zero_()
    elif "step" in state:
        state["step"] = 0
