"""The step that `torch.distributed.checkpoint.state_dict` makes only to see which state there is.

Before the first step it sets all gradients and learning rates to 0 and calls `step`. That must not count as
an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim.initial_state import entry_state, initial_value, reset_state
from gradpolicy.optim.mask_transition import set_masks
from gradpolicy.optim.masked_parameter import MaskedParameter, step_count
from gradpolicy.tensors.sharding import local_shard


def is_probe(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the next step is an optimizer's first, and changes nothing: all rates and gradients are 0."""
    groups = optimizer.param_groups
    if optimizer.state or not all("lr" in group and float(group["lr"]) == 0 for group in groups):
        return False
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return bool(gradients) and not any(bool(gradient.count_nonzero()) for gradient in gradients)


def probe(optimizer: torch.optim.Optimizer, masked: Iterable[MaskedParameter]) -> list[dict[str, Any]]:
    """Makes the state of every parameter without counting an update.

    Args:
        optimizer: the wrapped optimizer.
        masked: its masked parameters.

    Returns:
        Of each param group what the step has added to it, such as a count of steps.
    """
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = [local_shard(parameter.detach()).clone() for parameter in parameters]
    optimizer.step()
    for parameter, value in zip(parameters, values, strict=True):
        # A step by 0 may make 0 of -0, and NaN where eps is too small for half precision.
        local_shard(parameter.detach()).copy_(value)
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        group.update(before)
        for parameter in (p for p in group["params"] if p in optimizer.state):
            state = optimizer.state[parameter]
            # Weight decay has gone into the momentum of SGD.
            reset_state(optimizer, group, parameter, state)
            _restart_count(state)
    # Ages stay where the optimizer keeps no state: they are not what the probe has made.
    made = [each for each in masked if optimizer.state.get(each.parameter)]
    set_masks([(each, each.adopt_state(updates=0)) for each in made])
    pairs = zip(optimizer.param_groups, settings, strict=True)
    return [
        {name: group[name] for name in group.keys() - before.keys() - {"params"}} for group, before in pairs
    ]


def forget(
    optimizer: torch.optim.Optimizer,
    added: list[dict[str, Any]],
    closure: bool,
    masked_of: Mapping[Tensor, MaskedParameter],
) -> None:
    """Lets the first update make its state itself, as without a probe. What was loaded meanwhile stays.

    Empty state is not always what an optimizer begins with: some begins at the learning rate, which is 0 in a
    probe, and the momentum of SGD begins at the first gradient.

    Args:
        optimizer: the wrapped optimizer.
        added: what `probe` gave.
        closure: whether the update makes the gradients; else those that have one are updated.
        masked_of: what is known of masked parameters.
    """
    for group, counts in zip(optimizer.param_groups, added, strict=False):
        moving = [parameter for parameter in group["params"] if closure or parameter.grad is not None]
        new = [each for each in moving if not has_begun(optimizer, group, each, masked_of.get(each))]
        for parameter in new:
            optimizer.state.pop(parameter, None)
        for name, count in counts.items() if new and len(new) == len(moving) else ():
            if group.get(name) is count:
                del group[name]


def has_begun(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: Tensor,
    masked: MaskedParameter | None = None,
) -> bool:
    """Whether a parameter has been updated, as far as this process can tell by itself."""
    if masked is not None and masked.rule is not None:
        # The tensor's own count goes on where other processes update it; the age of an entry does not.
        return (masked.updates if masked.bias_correction == "tensor" else masked.oldest) > 0
    state = optimizer.state.get(parameter, {})
    moved = (
        bool(local_shard(value).count_nonzero())
        and initial_value(optimizer, key, group, parameter) in (0, None)
        for key, value in entry_state(state, parameter).items()
    )
    return step_count(state) > 0 or any(moved)


def _restart_count(state: dict[str, Any]) -> None:
    if isinstance(state.get("step"), Tensor):
        state["step"].zero_()
    elif "step" in state:
        state["step"] = 0
