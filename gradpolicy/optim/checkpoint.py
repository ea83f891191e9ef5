"""What a checkpoint holds of one parameter beside the wrapped optimizer's own state: its mask and ages.

A record holds the signed ages, which tell the mask too, and the settings. `record_groups` says where records
lie in a state_dict.
"""

from __future__ import annotations

from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import entry_ages, record_groups
from gradpolicy.optim.initial_state import first_step_state, is_torchs_own
from gradpolicy.optim.layout import Layout, coarse_mask
from gradpolicy.optim.mask_transition import adopt_ages, freezes_whole_tensor, take_empty_mask
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.options import OPTIONS, checked
from gradpolicy.optim.record_groups import KEY, Record, split
from gradpolicy.tensors.sharding import is_sharded

__all__ = ["KEY", "Record", "check", "check_state", "record_of", "restore", "save", "split"]


def save(
    inner: torch.optim.Optimizer, masked_of: dict[Tensor, MaskedParameter], effective_steps: int
) -> dict[str, Any]:
    """The wrapped optimizer's state_dict, with dense state, and in its param groups the records."""
    result = inner.state_dict()
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    records: dict[int, Record] = {}
    for index, parameter in enumerate(parameters):
        masked = masked_of.get(parameter)
        if masked is None:
            continue
        records[index] = record_of(masked)
        if not is_sharded(parameter):
            records[index]["begun"] = masked.dropped or bool(result["state"].get(index))
        # A process may have dropped all of its state while others have theirs.
        state = _dense_state(masked, bool(inner.state) or effective_steps > 0)
        if state:
            result["state"][index] = state
    # Processes gather shards in this order, and on each of them another parameter may have begun first.
    in_order = {index: result["state"][index] for index in range(len(parameters)) if index in result["state"]}
    result["state"] = in_order | result["state"]
    if records:
        record_groups.put(result, records, effective_steps)
    return result


def record_of(masked: MaskedParameter) -> Record:
    """One parameter's mask and ages."""
    return {
        "ages": masked.signed_ages(),
        "mask_shape": None if masked.mask_shape is None else list(masked.mask_shape),
        "updates": masked.updates,
        "frozen_state": masked.frozen_state,
        "bias_correction": masked.bias_correction,
    }


def _dense_state(masked: MaskedParameter, begun: bool) -> dict[str, Any]:
    """The state as the wrapped optimizer would hold it.

    Args:
        masked: whose state.
        begun: whether updates have begun, here or elsewhere: then there is a state, if only an initial one.
    """
    state = masked.dense_state()
    if masked.rule is not None and begun:
        return {**masked.initial_state(masked.group, set(state), dense=True), **state}
    if begun and not state and (is_sharded(masked.parameter) or is_torchs_own(masked.optimizer)):
        # A checkpoint has one form, whatever is frozen, as torch's own demand; restoring empties it again.
        return first_step_state(masked.optimizer, masked.parameter, masked.group)
    return state


# --- loading


def check(record: Record, parameter: Tensor, name: str) -> None:
    """Makes sure that a record can be given to a parameter, before anything is loaded.

    Raises:
        PolicyError: it lacks something, or is another parameter's; says what and which.
    """
    for key in ("ages", "mask_shape", "updates", *OPTIONS):
        if key not in record:
            raise PolicyError(f"{name}: its saved record has no {key!r}")
    try:
        for option in OPTIONS:
            checked(option, record[option])
    except PolicyError as error:
        raise PolicyError(f"{name}: saved {error}") from None
    ages, shape = record["ages"], record["mask_shape"]
    if ages.is_floating_point() or ages.dtype == torch.bool:
        raise PolicyError(f"{name}: its saved ages are {ages.dtype}, not whole numbers; the file is damaged")
    if not _broadcasts(ages.shape, parameter):
        _refuse("ages", ages.shape, parameter, name)
    if shape is not None and not _broadcasts(shape, parameter):
        _refuse("mask", shape, parameter, name)
    if not is_sharded(ages) and bool((ages == 0).any()):
        raise PolicyError(f"{name}: its saved ages have a 0, which no entry has; the file is damaged")


def _broadcasts(shape: Any, parameter: Tensor) -> bool:
    pairs = zip(shape, parameter.shape, strict=False)
    return len(shape) == parameter.dim() and all(size in (1, full) for size, full in pairs)


def check_state(state: dict[str, Any], names: tuple[str, ...], parameter: Tensor, name: str) -> None:
    """Makes sure that what an update rule keeps is a parameter's, which torch does not look at.

    Raises:
        PolicyError: it has another shape.
    """
    for key in names:
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape != parameter.shape:
            _refuse(key, value.shape, parameter, name)


def _refuse(what: str, shape: Any, parameter: Tensor, name: str) -> NoReturn:
    raise PolicyError(
        f"{name}: the saved {what!r} has the shape {tuple(shape)}, the parameter "
        f"{tuple(parameter.shape)}; load what was saved of this model"
    )


def restore(masked: MaskedParameter, record: Record) -> None:
    """Gives a parameter the mask and ages of a record; its state is loaded already, and dense."""
    masked.frozen_state, masked.bias_correction = record["frozen_state"], record["bias_correction"]
    masked.begin(int(record["updates"]))
    if not record.get("begun", True):
        # Its first update is still to come, and is not that of a parameter with an empty state.
        masked.optimizer.state.pop(masked.parameter, None)
    parameter, shape, ages = masked.parameter, record["mask_shape"], record["ages"]
    masked.mask_shape = None if shape is None else tuple(shape)
    if is_sharded(parameter):
        active = entry_ages.is_active(ages)
        mask = active if shape is None else coarse_mask(active, parameter, shape)
        masked.frozen_everywhere = freezes_whole_tensor(mask)
        if not masked.layout.size:
            take_empty_mask(masked, mask)
            return
        ages = ages if is_sharded(ages) else ages.expand(parameter.shape)
        values, block = masked.layout.blocks_of(ages, parameter)
        block = _coarsest(masked.layout, values)
        values = values.view(-1, block)[:, 0].contiguous()
    else:
        values, block = masked.layout.blocks_of(ages, parameter)
    if masked.layout.size:
        adopt_ages(masked, values, block)


def _coarsest(layout: Layout, values: Tensor) -> int:
    """The largest block of entries within which each has one value."""
    physical = layout.physical_shape
    for leading in range(len(physical) + 1):
        block = prod(physical[leading:])
        rows = values.view(-1, block)
        if bool((rows == rows[:, :1]).all()):
            return block
    return 1
