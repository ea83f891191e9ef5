"""Masks and ages beside the wrapped optimizer's own state_dict.

    {"state": ..., "param_groups": ...,
     "gradpolicy": {"version", "effective_steps", "parameters": {index: record}}}

See `saving` for what a record holds.

`torch.distributed.checkpoint.state_dict` passes on only "state" and "param_groups". So each param group holds
the records of its parameters, too. This form has two peculiarities:

- A plain torch optimizer that has loaded a group saves all that stands in it again, whatever steps it has
  made since. So a record carries a checksum of the state it belongs to, which tells whether it is outdated.
- With `full_state_dict=True`, an entry that the loading optimizer does not have yet arrives only if it is a
  tensor of at least one dimension. So records are tensors, and the text in them is stored as bytes.
"""

from __future__ import annotations

import json
import zlib
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import restoring
from gradpolicy.optim.layout import is_sharded
from gradpolicy.optim.saving import record_of
from gradpolicy.optim.tracked import Tracked

KEY = "gradpolicy"
VERSION = 1
# So many values of a tensor tell whether it has changed.
_SAMPLE = 64
# A text's length in bytes is a multiple of this, so that texts of one run are mostly of one length.
_TEXT_BYTES = 1024


def save(
    inner: torch.optim.Optimizer, tracked: dict[Tensor, Tracked], effective_steps: int
) -> dict[str, Any]:
    """The wrapped optimizer's state_dict, with dense moments, and the records of masked parameters."""
    result = inner.state_dict()
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    records: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        if parameter in tracked:
            records[index] = record_of(tracked[parameter])
            if "settings" not in records[index]:
                records[index]["begun"] = bool(result["state"].get(index))
            # A process may have dropped all of its state while others have theirs.
            state = restoring.state_to_save(tracked[parameter], bool(inner.state) or effective_steps > 0)
            if state:
                result["state"][index] = state
    result[KEY] = {"version": VERSION, "effective_steps": effective_steps, "parameters": records}
    if records:
        _put_into_groups(result, records, inner.param_groups)
    return result


# --- records within param groups


def _put_into_groups(
    result: dict[str, Any], records: dict[int, dict[str, Any]], live: list[dict[str, Any]]
) -> None:
    """Give each param group of a state_dict the records of its parameters, by their positions in the group.

    Args:
        result: the state_dict.
        records: by the index of the parameter.
        live: the optimizer's own param groups.
    """
    first = 0
    for group, own in zip(result["param_groups"], live, strict=True):
        inside = range(first, first + len(group["params"]))
        first = inside.stop
        device = next((parameter.device for parameter in own["params"]), torch.device("cpu"))
        texts: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for position, index in enumerate(inside):
            if index not in records:
                continue
            record = records[index]
            if "settings" in record:
                tensors[str(position)] = {**record, "settings": _as_bytes(record["settings"], device)}
                continue
            text, tensors[str(position)] = _part(record)
            texts[str(position)] = {**text, "mark": _mark(result["state"].get(index, {}))}
        saved = {key: result[KEY][key] for key in ("version", "effective_steps")}
        text_of_all = _as_bytes(json.dumps({**saved, "parameters": texts}), device)
        group[KEY] = {"text": text_of_all, "tensors": tensors}


def _part(record: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Part a record into what JSON can hold, shapes included, and its tensors, flattened."""
    text, tensors = dict(record), {}
    if record.get("mask") is not None:
        tensors["mask"], text["mask"] = record["mask"].reshape(-1), list(record["mask"].shape)
    if "slots" in record["ages"]:
        slots = record["ages"]["slots"]
        tensors["slots"], text["ages"] = slots.reshape(-1), {**record["ages"], "slots": list(slots.shape)}
    return text, tensors


def _join(text: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put a record together again.

    Raises:
        PolicyError: a tensor is missing, or has another size.
    """
    record = dict(text)
    if text.get("mask") is not None:
        record["mask"] = _shaped(tensors, "mask", text["mask"])
    if "slots" in text["ages"]:
        record["ages"] = {**text["ages"], "slots": _shaped(tensors, "slots", text["ages"]["slots"])}
    return record


def _shaped(tensors: dict[str, Tensor], name: str, shape: list[int]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.numel() != prod(shape):
        raise PolicyError(
            f"{KEY}: the saved {name!r} of shape {tuple(shape)} did not come through: "
            "torch.distributed.checkpoint.load reads what its target has, too; "
            "set masks of the saved shapes before the target's state is asked for"
        )
    return tensor.reshape(shape)


def _as_bytes(text: str, device: torch.device) -> Tensor:
    """A text as a uint8 tensor, padded with spaces."""
    content = text.encode()
    content = content.ljust(-(-len(content) // _TEXT_BYTES) * _TEXT_BYTES)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _as_text(content: Tensor) -> str:
    return content.cpu().numpy().tobytes().decode()


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
    own["param_groups"] = [_without_ours(group) for group in own["param_groups"]]
    if saved is None:
        saved = _gather(state_dict["param_groups"], own["state"])
    if saved.get("version", VERSION) > VERSION:
        raise PolicyError(f"{KEY}: saved by a newer gradpolicy (format {saved['version']}, known: {VERSION})")
    return own, saved


def _without_ours(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != KEY}


def _gather(groups: list[dict[str, Any]], states: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """What param groups hold, less what plain steps have outdated, in the form of the whole."""
    gathered: dict[str, Any] = {}
    parameters: dict[int, dict[str, Any]] = {}
    first = 0
    for group in groups:
        if KEY in group:
            saved = json.loads(_as_text(group[KEY]["text"]))
            tensors = group[KEY].get("tensors", {})
            for position, text in saved.pop("parameters").items():
                index = first + int(position)
                if not _is_outdated(states.get(index, {}), text.pop("mark")):
                    parameters[index] = _join(text, tensors.get(position, {}))
            for position, record in tensors.items():
                if "settings" in record:
                    settings = _as_text(record["settings"])
                    parameters[first + int(position)] = {**record, "settings": settings}
            gathered.update(saved)
        first += len(group["params"])
    return {**gathered, "parameters": parameters}


def _is_outdated(state: dict[str, Any], mark: int) -> bool:
    """Whether a state has changed since its mark was made; not known where it is missing or sharded."""
    sharded = any(isinstance(value, Tensor) and is_sharded(value) for value in state.values())
    return bool(state) and not sharded and _mark(state) != mark
