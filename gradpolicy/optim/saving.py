"""What a checkpoint holds of one parameter beside the wrapped optimizer's own state: its mask and its ages.

A record holds the mask (bool, as it was set) or the recipe that makes it, and the ages: two numbers where all
active entries share one and all frozen entries share one, else a small integer an entry and a table.

What `torch.distributed.checkpoint` loads must have the form of what it saved, whatever the processes have
done before and however many they are. So the record of a sharded parameter always has the same three entries:
the mask and the ages of each entry, sharded as the parameter, and the rest as text ("settings").
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import adam, restoring
from gradpolicy.optim.cohorts import Slots
from gradpolicy.optim.layout import check_mask, is_sharded
from gradpolicy.optim.options import OPTIONS, checked
from gradpolicy.optim.tracked import Tracked

Record = dict[str, Any]
_NEEDED = ("frozen_state", "bias_correction", "updates", "ages")


def record_of(tracked: Tracked) -> Record:
    """One parameter's mask and ages."""
    if is_sharded(tracked.parameter):
        return _sharded_record(tracked)
    record: Record = {
        "frozen_state": tracked.frozen_state,
        "bias_correction": tracked.bias_correction,
        "updates": tracked.updates,
        "ages": _ages(tracked),
    }
    if tracked.recipe is not None:
        record["recipe"] = dict(tracked.recipe.state())
    else:
        record["mask"] = None if tracked.mask_shape is None else tracked.mask().clone()
    return record


def _ages(tracked: Tracked) -> dict[str, Any]:
    slots = tracked.cohorts.slots
    ages: dict[str, Any] = {"active": list(slots.active), "frozen": list(slots.frozen)}
    if slots.most > 1:
        ages["slots"] = tracked.slot_numbers()
    return ages


def _sharded_record(tracked: Tracked) -> Record:
    settings = {
        "frozen_state": tracked.frozen_state,
        "bias_correction": tracked.bias_correction,
        "updates": tracked.updates,
        "mask_shape": tracked.mask_shape,
        "recipe": None if tracked.recipe is None else dict(tracked.recipe.state()),
    }
    mask, ages = tracked.entrywise()
    return {"mask": mask, "ages": ages, "settings": json.dumps(settings)}


def check(record: Record, parameter: Tensor, name: str) -> None:
    """Make sure that a record can be given to a parameter, before anything is loaded.

    Raises:
        PolicyError: it lacks something, or is another parameter's; says what and which.
    """
    sharded = "settings" in record
    settings = json.loads(record["settings"]) if sharded else record
    for key in _NEEDED:
        if key not in record and key not in settings:
            raise PolicyError(f"{name}: its saved record has no {key!r}")
    try:
        for option in OPTIONS:
            checked(option, settings[option])
    except PolicyError as error:
        raise PolicyError(f"{name}: saved {error}") from None
    if record.get("mask") is not None:
        check_mask(record["mask"], parameter, name)
    if settings.get("recipe") is not None:
        _recipe(settings)
    if not sharded:
        _check_ages(record["ages"], parameter, name)
    elif record["ages"].shape != parameter.shape:
        _refuse("ages", record["ages"], parameter, name)


def _check_ages(ages: dict[str, Any], parameter: Tensor, name: str) -> None:
    slots = ages.get("slots")
    if slots is None:
        return
    both = zip(slots.shape, parameter.shape, strict=False)
    if slots.dim() != parameter.dim() or not all(size in (1, full) for size, full in both):
        _refuse("ages", slots, parameter, name)
    known = max(len(ages["active"]), len(ages["frozen"]))
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < known:
        raise PolicyError(f"{name}: its saved ages point beyond their table of {known}; the file is damaged")


def check_state(state: dict[str, Any], parameter: Tensor, name: str) -> None:
    """Make sure that saved moments of Adam or AdamW are a parameter's, which torch does not look at.

    Raises:
        PolicyError: they have another shape.
    """
    for key in (*adam.MOMENTS, adam.LARGEST):
        moment = state.get(key)
        if isinstance(moment, Tensor) and moment.shape != parameter.shape:
            _refuse(key, moment, parameter, name)


def _refuse(what: str, saved: Tensor, parameter: Tensor, name: str) -> NoReturn:
    raise PolicyError(
        f"{name}: the saved {what!r} has the shape {tuple(saved.shape)}, the parameter "
        f"{tuple(parameter.shape)}; load what was saved of this model"
    )


def restore(tracked: Tracked, record: Record, name: str) -> None:
    """Give a parameter the mask and ages of a record; its state is loaded already, and dense."""
    if "settings" in record:
        _restore_sharded(tracked, record)
        return
    recipe = _recipe(record)
    mask = record.get("mask")
    if recipe is not None:
        mask = recipe.materialize(tracked.parameter.shape, tracked.parameter.device)
    if mask is not None:
        mask = check_mask(mask, tracked.parameter, name)
    tracked.frozen_state = record["frozen_state"]
    tracked.bias_correction = record["bias_correction"]
    slots = Slots(tuple(record["ages"]["active"]), tuple(record["ages"]["frozen"]))
    restoring.restore(tracked, mask, slots, record["ages"].get("slots"), int(record["updates"]))
    if not record.get("begun", True):
        # Its first step is still to come, and is not that of a parameter with an empty state.
        tracked.inner.state.pop(tracked.parameter, None)
    tracked.recipe = recipe


def _restore_sharded(tracked: Tracked, record: Record) -> None:
    settings = json.loads(record["settings"])
    tracked.frozen_state = settings["frozen_state"]
    tracked.bias_correction = settings["bias_correction"]
    shape = None if settings["mask_shape"] is None else tuple(settings["mask_shape"])
    restoring.restore_parts(tracked, record["mask"], record["ages"], shape, settings["updates"])
    tracked.recipe = _recipe(settings)


def _recipe(record: Record) -> Any:
    """The recipe of the mask; None where there is none."""
    if record.get("recipe") is None:
        return None
    from gradpolicy.tensors.seeded_mask import RandomMask

    return RandomMask.from_state(record["recipe"])
