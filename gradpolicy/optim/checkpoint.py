"""Masks and ages beside the wrapped optimizer's own state_dict.

    {"state": ..., "param_groups": ...,
     "gradpolicy": {"version", "effective_steps", "parameters": {index: record}}}

A record holds the mask (bool, as it was set) or the recipe that makes it, and the ages: two numbers where all
active entries share one and all frozen entries share one, else a small integer an entry and a table.
`torch.distributed.checkpoint.state_dict` passes on "state" and "param_groups" alone, so that each param group
refers to its records too. Torch's own optimizers hand on what stands in a group when they save: there each
record goes with a mark of the state it belongs to, so that one that plain steps have outdated is known.

What `torch.distributed.checkpoint` loads must have the form of what it saved, whatever the processes have
done before and however many they are. So the record of a sharded parameter always has the same three entries:
the mask and the ages of each entry, sharded as the parameter, and the rest as text.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import restoring
from gradpolicy.optim.cohorts import Slots
from gradpolicy.optim.layout import check_mask, is_sharded
from gradpolicy.optim.tracked import Tracked

KEY = "gradpolicy"
VERSION = 1
# So many values of a tensor tell whether it has changed.
_SAMPLE = 64


def save(
    inner: torch.optim.Optimizer, tracked: dict[Tensor, Tracked], effective_steps: int
) -> dict[str, Any]:
    """The whole state_dict."""
    result = inner.state_dict()
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    records: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        if parameter in tracked:
            records[index] = _record(tracked[parameter])
            if "settings" not in records[index]:
                records[index]["begun"] = bool(result["state"].get(index))
            # A process may have dropped all of its state while others have theirs.
            state = restoring.state_to_save(tracked[parameter], bool(inner.state) or effective_steps > 0)
            if state:
                result["state"][index] = state
    result[KEY] = {"version": VERSION, "effective_steps": effective_steps, "parameters": records}
    if records:
        _refer(result, records, effective_steps)
    return result


def _refer(result: dict[str, Any], records: dict[int, dict[str, Any]], effective_steps: int) -> None:
    first = 0
    for group in result["param_groups"]:
        count = len(group["params"])
        inside = [index for index in range(first, first + count) if index in records]
        group[KEY] = {
            "effective_steps": effective_steps,
            "parameters": {str(index - first): records[index] for index in inside},
            "marks": {
                str(index - first): _mark(result["state"].get(index, {}))
                for index in inside
                if "settings" not in records[index]
            },
        }
        first += count


def _mark(state: dict[str, Any]) -> int:
    """A checksum of some values of each part of a parameter's state."""
    mark = 0
    for key in sorted(state):
        value = state[key]
        if isinstance(value, Tensor):
            places = torch.arange(0, value.numel(), max(value.numel() // _SAMPLE, 1), device=value.device)
            sample = value[torch.unravel_index(places, value.shape)] if value.dim() else value.reshape(1)
            content = sample.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        else:
            content = repr(value).encode()
        mark = zlib.crc32(content, mark)
    return mark


def split(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part a saved state_dict into the wrapped optimizer's own and ours (empty where there is none)."""
    own = {key: value for key, value in state_dict.items() if key != KEY}
    saved = state_dict.get(KEY)
    own["param_groups"] = [{k: v for k, v in group.items() if k != KEY} for group in own["param_groups"]]
    if saved is None:
        saved = _gather(state_dict["param_groups"], own["state"])
    if saved.get("version", VERSION) > VERSION:
        raise PolicyError(f"{KEY}: saved by a newer gradpolicy (format {saved['version']}, known: {VERSION})")
    return own, saved


def _gather(groups: list[dict[str, Any]], states: dict[int, dict[str, Any]]) -> dict[str, Any]:
    parameters, first, steps = {}, 0, {}
    for group in groups:
        saved = group.get(KEY, {})
        marks = saved.get("marks", {})
        for position, record in saved.get("parameters", {}).items():
            index = first + int(position)
            if not _is_outdated(states.get(index, {}), marks.get(position)):
                parameters[index] = record
        steps.update({key: value for key, value in saved.items() if key == "effective_steps"})
        first += len(group["params"])
    return {"parameters": parameters, **steps}


def _is_outdated(state: dict[str, Any], mark: int | None) -> bool:
    """Whether a state has changed since its mark was made; not where one of them is missing or sharded."""
    sharded = any(isinstance(value, Tensor) and is_sharded(value) for value in state.values())
    return bool(state) and mark is not None and not sharded and _mark(state) != mark


def _record(tracked: Tracked) -> dict[str, Any]:
    """One parameter's masks and ages."""
    if is_sharded(tracked.parameter):
        return _sharded_record(tracked)
    record: dict[str, Any] = {
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


def _sharded_record(tracked: Tracked) -> dict[str, Any]:
    settings = {
        "frozen_state": tracked.frozen_state,
        "bias_correction": tracked.bias_correction,
        "updates": tracked.updates,
        "mask_shape": tracked.mask_shape,
        "recipe": None if tracked.recipe is None else dict(tracked.recipe.state()),
    }
    mask, ages = tracked.entrywise()
    return {"mask": mask, "ages": ages, "settings": json.dumps(settings)}


def _restore_sharded(tracked: Tracked, record: dict[str, Any]) -> None:
    settings = json.loads(record["settings"])
    tracked.frozen_state = settings["frozen_state"]
    tracked.bias_correction = settings["bias_correction"]
    shape = None if settings["mask_shape"] is None else tuple(settings["mask_shape"])
    restoring.restore_parts(tracked, record["mask"], record["ages"], shape, settings["updates"])
    if settings["recipe"] is not None:
        from gradpolicy.freeze.recipe import recipe_from_state

        tracked.recipe = recipe_from_state(settings["recipe"])


def _ages(tracked: Tracked) -> dict[str, Any]:
    slots = tracked.cohorts.slots
    ages: dict[str, Any] = {"active": list(slots.active), "frozen": list(slots.frozen)}
    if slots.most > 1:
        ages["slots"] = tracked.slot_numbers()
    return ages


def restore(tracked: Tracked, record: dict[str, Any], name: str) -> None:
    """Give a parameter the masks and ages of a record; its state is loaded already, and dense."""
    if "settings" in record:
        _restore_sharded(tracked, record)
        return
    mask = record.get("mask")
    recipe = None
    if "recipe" in record:
        from gradpolicy.freeze.recipe import recipe_from_state

        recipe = recipe_from_state(record["recipe"])
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
