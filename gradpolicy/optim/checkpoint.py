"""The record of each masked parameter's mask and ages in a state_dict.

    {"state": ..., "param_groups": [{..., "gradpolicy": {"general": ..., "parameters": {position: record}}}]}

A state_dict is as small as the state in memory, unless it must be dense. Then "state" has moments of the
active entries only, one after the other in memory, and nothing for tensors whose state was dropped. The
record says which entries these are, and has all that :func:`widened` needs to compute the dense form without
the model.

Torch alone can load a dense state_dict, and `torch.distributed.checkpoint` needs one to reshard tensors. Its
functions pass on only "state" and "param_groups". Two more constraints follow from other code:

- With `full_state_dict=True`, an entry that the loading optimizer does not have yet is loaded only if it is a
  tensor of at least one dimension, and `torch.distributed.checkpoint.load` reads only entries that its target
  has, in the same size. So a record is two tensors: its signed ages, and its settings as text in bytes,
  padded to a fixed length.
- A plain torch optimizer that has loaded a group saves all of it again, whatever steps it has made since. So
  a record has a checksum of the state that it belongs to.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim.layout import Layout
from gradpolicy.optim.masked_parameter import MaskedParameter, Options
from gradpolicy.optim.other_optimizers import first_state, is_torchs_own
from gradpolicy.optim.update_rules.base import step_count
from gradpolicy.optim.wrapped import Wrapped
from gradpolicy.tensors.packed_mask import unpack, written_once
from gradpolicy.tensors.sharding import is_sharded, plain_parts

Record = dict[str, Any]
"""The saved mask of one parameter: "ages" (a tensor), "held" if its state is not dense, and settings."""
KEY = "gradpolicy"
VERSION, DENSE_VERSION = 3, 2
_SAMPLED = 64
"""Number of values of a tensor that its checksum covers."""
_TEXT_BYTES = 1024
_HELD = "gradpolicy_"
"""Prefix of the names of state that is saved as it is in memory."""


# --- saving


def must_be_dense(wrapped: Wrapped) -> bool:
    """Return True if torch may reshard tensors: they are sharded, or torch.distributed.checkpoint calls.

    Raises:
        PolicyError: If it asks for a flattened state_dict.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
        frame = frame.f_back
    if frame is not None and getattr(frame.f_locals.get("info"), "flatten_optimizer_state_dict", False):
        raise PolicyError(
            "StateDictOptions(flatten_optimizer_state_dict=True): torch loads from a flattened state_dict "
            "only what plain optimizers have, and neither masks nor ages; leave it out"
        )
    return frame is not None or any(is_sharded(parameter) for parameter in wrapped.parameters())


def save(
    wrapped: Wrapped, masked_of: Mapping[Tensor, MaskedParameter], effective_steps: int, *, dense: bool
) -> dict[str, Any]:
    """Return the wrapped optimizer's state_dict, with the records in its param groups.

    Args:
        wrapped: The wrapped optimizer.
        masked_of: Its masked parameters.
        effective_steps: Its count of updates.
        dense: True if the state is to be as the wrapped optimizer alone would hold it.
    """
    result = wrapped.optimizer.state_dict()
    state, records = result["state"], {}
    parameters = wrapped.parameters()
    for index, parameter in enumerate(parameters):
        masked = masked_of.get(parameter)
        if masked is None:
            continue
        record = records[index] = _record(masked) if dense else _held_record(masked)
        if not is_sharded(parameter):
            record["begun"] = bool(state.get(index))
        # A process may have dropped all of its state while others have theirs.
        begun = bool(wrapped.optimizer.state) or effective_steps > 0
        # The next mask changes which tensors a state has, so the saved one is a dict of its own.
        if dense:
            own = _dense_state(masked, begun)
        elif masked.rule is None:
            own = masked.dense_state()
        else:
            own = _renamed(record, state.get(index, {}))
        if own:
            state[index] = own
    # Processes gather shards in this order; the order of first updates may differ between them.
    result["state"] = {index: state[index] for index in range(len(parameters)) if index in state} | state
    return _with_records(result, records, effective_steps, dense=dense)


def _with_records(
    result: dict[str, Any], records: dict[int, Record], effective_steps: int, *, dense: bool
) -> dict[str, Any]:
    """Put records into the param groups of a state_dict."""
    for first, group in _with_first_index(result["param_groups"]) if records else ():
        own = {
            str(index - first): (record, result["state"].get(index, {}))
            for index, record in records.items()
            if first <= index < first + len(group["params"])
        }
        general: Any = {"version": DENSE_VERSION if dense else VERSION, "effective_steps": effective_steps}
        if dense:
            saved: dict[str, Any] = {place: _as_tensors(*each) for place, each in own.items()}
            device = next((each["settings"].device for each in saved.values()), torch.device("cpu"))
            general = _as_bytes(general, device)
        else:
            saved = {place: {**record, "mark": _checksum(state)} for place, (record, state) in own.items()}
        group[KEY] = {"general": general, "parameters": saved}
    return result


def _record(masked: MaskedParameter, ages: Tensor | None = None) -> Record:
    return {
        "ages": masked.signed_ages() if ages is None else ages,
        "mask_shape": None if masked.mask_shape is None else list(masked.mask_shape),
        "updates": masked.updates,
        **masked.options._asdict(),
    }


def _held_record(masked: MaskedParameter) -> Record:
    """Return the record of a state as it is in memory; it has "held" if that is not dense."""
    state, ages, layout = masked.follow(), masked.ages, masked.layout
    starts = {} if masked.rule is None else masked.rule.state(masked.group)
    starts = {name: start for name, start in starts.items() if name in state}
    if ages.index is None and all(state[name] is not None for name in starts):
        return _record(masked)
    signed = masked.signed_ages()
    if ages.index is not None:
        signed = ages.of_active_blocks()
        signed = signed[:1].clone() if bool((signed == signed[0]).all()) else signed
    held = {
        "index": None if ages.index is None else written_once(ages.index),
        "block": ages.block,
        "shape": list(layout.shape),
        "order": list(layout.order),
        "starts": starts,
        "dtype": str(masked.parameter.dtype).removeprefix("torch."),
    }
    return {**_record(masked, signed), "held": held}


def _renamed(record: Record, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose parts that are not dense have a prefix to their names.

    Torch's fused Adam on CPUs writes beyond the end of a state that is too small, but raises an error if it
    does not find it.
    """
    starts = record.get("held", {}).get("starts", ())
    return {_HELD + key if key in starts else key: value for key, value in state.items()}


def _dense_state(masked: MaskedParameter, begun: bool) -> dict[str, Any]:
    """Return the state as the wrapped optimizer would hold it.

    Args:
        masked: The parameter.
        begun: True if an update was made, on any process: then there is a state, even if only an initial one.
    """
    state, optimizer = masked.dense_state(), masked.state.wrapped.optimizer
    if masked.rule is not None and begun:
        whole = {**masked.state.initial(masked.group, masked.updates), **state}
        return masked.rule.dense_state(whole, masked.parameter.detach())
    if begun and not state and (is_sharded(masked.parameter) or is_torchs_own(optimizer)):
        # Torch expects the same entries whatever is frozen; restoring removes them again.
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
    """Separate a saved state_dict into that of the wrapped optimizer and the records.

    Returns:
        The optimizer's state_dict; the number of updates, if it was saved; and the records by the index of
        the parameter, without those that plain steps have outdated.

    Raises:
        PolicyError: If a newer version saved it, or a tensor was not loaded.
    """
    groups = state_dict["param_groups"]
    own = {**state_dict, "param_groups": [{k: v for k, v in group.items() if k != KEY} for group in groups]}
    steps, records, states = None, {}, states_in_order(own)
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
            if index < len(states) and _is_others(record, states[index]):
                continue
            if not _is_outdated(own["state"].get(index, {}), record.pop("mark", None)):
                records[index] = record
            elif "held" in record:
                raise PolicyError(
                    f"{KEY}: the saved state of parameter {index} was changed; the file is damaged"
                )
    return own, steps, records


def states_in_order(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the state of each parameter, which torch.distributed.checkpoint saves by name."""
    keys = (key for group in state_dict["param_groups"] for key in group["params"])
    return [state_dict["state"].get(key, {}) for key in keys]


def _is_others(record: Record, state: dict[str, Any]) -> bool:
    """Return True for the record of an optimizer into which a whole state_dict without masks is loaded.

    It has counted no update, and the state has. Torch fills in what is missing in a state_dict from the
    optimizer that loads it.
    """
    return is_sharded(record["ages"]) and not record["updates"] and step_count(state) > 0


def _with_first_index(groups: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each group with the index of its first parameter."""
    first = 0
    for group in groups:
        yield first, group
        first += len(group["params"])


def _as_record(tensors: dict[str, Any]) -> Record:
    if "settings" not in tensors:
        return dict(tensors)
    settings = _as_object(tensors["settings"])
    ages, shape = tensors.get("ages"), settings.pop("ages_shape")
    if ages is None or ages.numel() != prod(shape):
        raise PolicyError(
            f"{KEY}: the saved ages of shape {tuple(shape)} did not come through: "
            "torch.distributed.checkpoint.load reads what its target has, too; "
            "set masks of the saved shapes before the target's state is asked for"
        )
    return {**settings, "ages": ages if is_sharded(ages) else ages.reshape(shape)}


def _as_object(saved: Tensor | dict[str, Any]) -> dict[str, Any]:
    if isinstance(saved, dict):
        return saved
    loaded: dict[str, Any] = json.loads(saved.cpu().numpy().tobytes().decode())
    return loaded


def _checksum(state: dict[str, Any]) -> int:
    """Return a checksum of some values of each part of a parameter's state."""
    found = 0
    for key, value in sorted(state.items()):
        value = plain_parts(value)[0] if isinstance(value, Tensor) and not is_sharded(value) else value
        if not isinstance(value, Tensor):
            found = zlib.crc32(repr(value).encode(), found)
        elif value.dim() or key == "step":  # torch casts other numbers to the parameter's dtype
            places = torch.arange(0, value.numel(), max(value.numel() // _SAMPLED, 1), device=value.device)
            sampled = value[torch.unravel_index(places, value.shape)] if value.dim() else value.reshape(1)
            found = zlib.crc32(sampled.detach().cpu().view(torch.uint8).numpy().data, found)
    return found


def _is_outdated(state: dict[str, Any], checksum: int | None) -> bool:
    """Return True if a state has changed since its checksum was made; False if it is missing or sharded."""
    sharded = any(isinstance(value, Tensor) and is_sharded(value) for value in state.values())
    return checksum is not None and bool(state) and not sharded and _checksum(state) != checksum


def widened(record: Record, state: dict[str, Any], name: str) -> tuple[Record, dict[str, Any]]:
    """Return a record and its state in dense form.

    Args:
        record: The record; one without "held" is dense already.
        state: The state of the parameter as it was held.
        name: Its name in messages.

    Raises:
        PolicyError: If they do not belong together.
    """
    held = record.get("held")
    if held is None:
        return record, state
    try:
        return _widened(record, held, state)
    except (RuntimeError, IndexError, LookupError, TypeError, ValueError, AttributeError) as error:
        line = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise PolicyError(
            f"{name}: its saved mask and state do not belong together ({line}); the file is damaged"
        ) from error


def _widened(record: Record, held: dict[str, Any], state: dict[str, Any]) -> tuple[Record, dict[str, Any]]:
    layout = Layout(torch.Size(held["shape"]), tuple(held["shape"]), tuple(held["order"]), plain=False)
    block, dtype, ages = held["block"], getattr(torch, held["dtype"]), record["ages"]
    flags = torch.zeros(layout.size // block, dtype=torch.bool, device="cpu")
    if held["index"] is not None:
        flags = unpack(held["index"], len(flags))

    def spread(values: Tensor, width: int, start: float) -> Tensor:
        rows = values.new_full((len(flags), width), start)
        rows[flags.to(values.device)] = values.view(-1, width)
        return layout.spread(rows.view(-1), block // width)

    wide = {key: value for key, value in state.items() if not key.startswith(_HELD)}
    for key, start in held["starts"].items():
        if _HELD + key in state:
            value = state[_HELD + key]
            value = ages.new_empty(0, dtype=dtype.to_real()) if value is None else value
            value = spread(value, block, start)
            wide[key] = torch.view_as_complex(value) if dtype.is_complex else value
    if held["index"] is not None:
        ages = spread(ages, 1, -1)
        ages = ages.select(-1, 0) if dtype.is_complex else ages
    return {**{key: value for key, value in record.items() if key != "held"}, "ages": ages}, wide


def dense(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state_dict in the form that torch alone can load; a dense one as it is.

    A parameter whose state was dropped has none; torch creates it, as for one that never had a gradient.

    Raises:
        PolicyError: If it is damaged.
    """
    own, steps, records = split(state_dict)
    if not any("held" in record for record in records.values()):
        return state_dict
    state = dict(own["state"])
    for index, record in records.items():
        records[index], wide = widened(record, state.get(index, {}), f"parameter {index}")
        state |= {index: wide} if wide else {}
    return _with_records({**own, "state": state}, records, steps or 0, dense=True)


def take_out(wrapped: Wrapped) -> None:
    """Make state dense that a plain optimizer has loaded, and remove the records from its groups."""
    groups, parameters = wrapped.optimizer.param_groups, wrapped.parameters()
    state = {index: wrapped.state_of(parameter) for index, parameter in enumerate(parameters)}
    _, _, records = split({"state": state, "param_groups": groups})
    for index, record in records.items():
        if state[index] and "held" in record:
            parameter = parameters[index]
            wrapped.optimizer.state[parameter] = widened(record, state[index], wrapped.name_of(parameter))[1]
    for group in groups:
        group.pop(KEY, None)


def check(record: Record, state: dict[str, Any], masked: MaskedParameter, name: str) -> None:
    """Check a record and its state against a parameter, before anything is loaded.

    Raises:
        PolicyError: If something is missing or damaged, or belongs to another parameter.
    """
    record, state = widened(record, state, name) if "ages" in record else (record, state)
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
    """Restore a parameter's mask and ages from a record; its state is loaded already, as it was saved."""
    state, optimizer = masked.state.values, masked.state.wrapped.optimizer
    record, wide = widened(record, state, masked.state.wrapped.name_of(masked.parameter))
    if wide is not state:
        optimizer.state[masked.parameter] = wide
    shape = record["mask_shape"]
    masked.restore(
        record["ages"],
        None if shape is None else tuple(shape),
        int(record["updates"]),
        bool(record.get("begun", True)),
        Options(record["frozen_state"], record["bias_correction"]),
    )
