"""The record of each masked parameter's mask and ages in a state_dict.

    {"state": ..., "param_groups": [{..., "gradpolicy": {"general": text, "parameters": {position: record}}}]}

`torch.distributed.checkpoint.state_dict` passes on only "state" and "param_groups". Two more things follow
from what others do with them:

- With `full_state_dict=True`, an entry that the loading optimizer does not have yet arrives only if it is a
  tensor of at least one dimension, and `torch.distributed.checkpoint.load` reads only what its target has, in
  the same size. So a record is two tensors, its signed ages and its settings as text in bytes, padded to one
  length.
- A plain torch optimizer that has loaded a group saves all that stands in it again, whatever steps it has
  made since. So a record carries a checksum of the state that it belongs to.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim.masked_parameter import MaskedParameter, Options
from gradpolicy.optim.other_optimizers import first_state, is_torchs_own
from gradpolicy.optim.wrapped import Wrapped
from gradpolicy.tensors.sharding import is_sharded

Record = dict[str, Any]
"""The saved mask of one parameter: "ages" (a tensor) and settings that JSON can hold."""
KEY = "gradpolicy"
VERSION = 2
_SAMPLED = 64
"""So many values of a tensor tell whether it has changed."""
_TEXT_BYTES = 1024


# --- saving


def save(
    wrapped: Wrapped, masked_of: Mapping[Tensor, MaskedParameter], effective_steps: int
) -> dict[str, Any]:
    """Return the wrapped optimizer's state_dict, with dense state, and in its param groups the records."""
    result = wrapped.optimizer.state_dict()
    state, records = result["state"], {}
    parameters = wrapped.parameters()
    for index, parameter in enumerate(parameters):
        masked = masked_of.get(parameter)
        if masked is None:
            continue
        record = records[index] = _record(masked)
        if not is_sharded(parameter):
            record["begun"] = bool(state.get(index))
        # A process may have dropped all of its state while others have theirs.
        own = _dense_state(masked, bool(wrapped.optimizer.state) or effective_steps > 0)
        if own:
            state[index] = own
    # Processes gather shards in this order, and on each of them another parameter may have begun first.
    result["state"] = {index: state[index] for index in range(len(parameters)) if index in state} | state
    for first, group in _with_first_index(result["param_groups"]) if records else ():
        own_records = {
            str(index - first): _as_tensors(record, result["state"].get(index, {}))
            for index, record in records.items()
            if first <= index < first + len(group["params"])
        }
        general = {"version": VERSION, "effective_steps": effective_steps}
        device = next((each["settings"].device for each in own_records.values()), torch.device("cpu"))
        group[KEY] = {"general": _as_bytes(general, device), "parameters": own_records}
    return result


def _record(masked: MaskedParameter) -> Record:
    return {
        "ages": masked.signed_ages(),
        "mask_shape": None if masked.mask_shape is None else list(masked.mask_shape),
        "updates": masked.updates,
        **masked.options._asdict(),
    }


def _dense_state(masked: MaskedParameter, begun: bool) -> dict[str, Any]:
    """Return the state as the wrapped optimizer would hold it.

    Args:
        masked: The parameter.
        begun: True if updates have begun, here or on others: then there is a state, if only an initial one.
    """
    state, optimizer = masked.dense_state(), masked.state.wrapped.optimizer
    if masked.rule is not None and begun:
        return {**masked.state.initial(masked.group, masked.updates), **state}
    if begun and not state and (is_sharded(masked.parameter) or is_torchs_own(optimizer)):
        # A checkpoint has one form, whatever is frozen, as torch's own demand; restoring empties it again.
        return first_state(optimizer, masked.group, masked.parameter)
    return state


def _as_tensors(record: Record, state: dict[str, Any]) -> dict[str, Tensor]:
    ages = record.pop("ages")
    flat = ages if is_sharded(ages) else ages.reshape(-1)
    mark = None if is_sharded(ages) else _checksum(state)
    settings = {**record, "ages_shape": list(ages.shape), "mark": mark}
    return {"ages": flat, "settings": _as_bytes(settings, ages.device)}


def _as_bytes(value: dict[str, Any], device: torch.device) -> Tensor:
    """Return JSON as a uint8 tensor, padded with spaces."""
    text = json.dumps(value).encode()
    text = text.ljust(-(-len(text) // _TEXT_BYTES) * _TEXT_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


# --- loading


def split(state_dict: dict[str, Any]) -> tuple[dict[str, Any], int | None, dict[int, Record]]:
    """Part a saved state_dict into the wrapped optimizer's own and the records.

    Returns:
        The optimizer's own; the count of updates, if one is saved; and the records by the index of the
        parameter, without those that plain steps have outdated.

    Raises:
        PolicyError: If a newer version saved it, or a tensor did not come through.
    """
    groups = state_dict["param_groups"]
    own = {**state_dict, "param_groups": [{k: v for k, v in group.items() if k != KEY} for group in groups]}
    steps, records = None, {}
    for first, group in _with_first_index(groups):
        if KEY not in group:
            continue
        general = _as_object(group[KEY]["general"])
        if general["version"] > VERSION:
            raise PolicyError(
                f"{KEY}: saved by a newer gradpolicy (format {general['version']}, known: {VERSION})"
            )
        steps = int(general["effective_steps"])
        for position, tensors in group[KEY].get("parameters", {}).items():
            record, index = _as_record(tensors), first + int(position)
            if not _is_outdated(own["state"].get(index, {}), record.pop("mark", None)):
                records[index] = record
    return own, steps, records


def _with_first_index(groups: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each group with the index of its first parameter."""
    first = 0
    for group in groups:
        yield first, group
        first += len(group["params"])


def _as_record(tensors: dict[str, Tensor]) -> Record:
    settings = _as_object(tensors["settings"])
    ages, shape = tensors.get("ages"), settings.pop("ages_shape")
    if ages is None or ages.numel() != prod(shape):
        raise PolicyError(
            f"{KEY}: the saved ages of shape {tuple(shape)} did not come through: "
            "torch.distributed.checkpoint.load reads what its target has, too; "
            "set masks of the saved shapes before the target's state is asked for"
        )
    return {**settings, "ages": ages if is_sharded(ages) else ages.reshape(shape)}


def _as_object(text: Tensor) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(text.cpu().numpy().tobytes().decode())
    return loaded


def _checksum(state: dict[str, Any]) -> int:
    """Return a checksum of some values of each part of a parameter's state."""
    found = 0
    for key, value in sorted(state.items()):
        if not isinstance(value, Tensor):
            found = zlib.crc32(repr(value).encode(), found)
        elif (
            value.dim() or key == "step"
        ):  # torch casts what it counts beside the steps to the parameter's dtype
            places = torch.arange(0, value.numel(), max(value.numel() // _SAMPLED, 1), device=value.device)
            sampled = value[torch.unravel_index(places, value.shape)] if value.dim() else value.reshape(1)
            found = zlib.crc32(sampled.detach().cpu().view(torch.uint8).numpy().data, found)
    return found


def _is_outdated(state: dict[str, Any], checksum: int | None) -> bool:
    """Return True if a state has changed since its checksum was made; False if it is missing or sharded."""
    sharded = any(isinstance(value, Tensor) and is_sharded(value) for value in state.values())
    return checksum is not None and bool(state) and not sharded and _checksum(state) != checksum


def check(record: Record, state: dict[str, Any], masked: MaskedParameter, name: str) -> None:
    """Make sure that a record and its state can be given to a parameter, before anything is loaded.

    Raises:
        PolicyError: If something is missing, damaged, or another parameter's.
    """
    for key in ("ages", "mask_shape", "updates", *Options._fields):
        if key not in record:
            raise PolicyError(f"{name}: its saved record has no {key!r}")
    try:
        Options().changed(**{option: record[option] for option in Options._fields})
    except PolicyError as error:
        raise PolicyError(f"{name}: saved {error}") from None
    ages, parameter = record["ages"], masked.parameter
    if ages.is_floating_point() or ages.dtype == torch.bool:
        raise PolicyError(f"{name}: its saved ages are {ages.dtype}, not whole numbers; the file is damaged")
    for what, shape in (("ages", ages.shape), ("mask", record["mask_shape"] or (1,) * parameter.dim())):
        fits = [size in (1, full) for size, full in zip(shape, parameter.shape, strict=False)]
        if len(shape) != parameter.dim() or not all(fits):
            _refuse(what, shape, parameter, name)
    if not is_sharded(ages) and bool((ages == 0).any()):
        raise PolicyError(f"{name}: its saved ages have a 0, which no entry has; the file is damaged")
    for key in masked.rule.names if masked.rule is not None else ():
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape != parameter.shape:
            _refuse(key, value.shape, parameter, name)


def _refuse(what: str, shape: Any, parameter: Tensor, name: str) -> NoReturn:
    raise PolicyError(
        f"{name}: the saved {what!r} has the shape {tuple(shape)}, the parameter "
        f"{tuple(parameter.shape)}; load what was saved of this model"
    )


def restore(masked: MaskedParameter, record: Record) -> None:
    """Give a parameter the mask and ages of a record; its state is loaded already, and dense."""
    masked.options = Options(record["frozen_state"], record["bias_correction"])
    shape = record["mask_shape"]
    masked.restore(
        record["ages"],
        None if shape is None else tuple(shape),
        int(record["updates"]),
        bool(record.get("begun", True)),
    )
