"""Where the records of masked parameters lie in a state_dict: in its param groups.

    {"state": ..., "param_groups": [{..., "gradpolicy": {"general": text, "parameters": {position: record}}}]}

`torch.distributed.checkpoint.state_dict` passes on only "state" and "param_groups". Two more things follow
from what others do with them:

- With `full_state_dict=True`, an entry that the loading optimizer does not have yet arrives only if it is a
  tensor of at least one dimension, and `torch.distributed.checkpoint.load` reads only what its target has, in
  the same size. So a record is two tensors, its ages and its settings as text in bytes, padded to one length.
- A plain torch optimizer that has loaded a group saves all that stands in it again, whatever steps it has
  made since. So a record carries a checksum of the state it belongs to, which tells whether it is outdated.
"""

from __future__ import annotations

import json
import zlib
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.tensors.sharding import is_sharded

Record = dict[str, Any]
"""What is saved of one parameter: "ages" (a tensor) and settings that JSON can hold."""
KEY = "gradpolicy"
VERSION = 2
_SAMPLE = 64
"""So many values of a tensor tell whether it has changed."""
_TEXT_BYTES = 1024


def put(result: dict[str, Any], records: dict[int, Record], effective_steps: int) -> None:
    """Gives each param group of a state_dict the records of its parameters, by their positions in the group.

    Args:
        result: the state_dict.
        records: by the index of the parameter.
        effective_steps: updates that took place.
    """
    for first, group in _with_first_index(result["param_groups"]):
        parameters: dict[str, dict[str, Tensor]] = {}
        for position in range(len(group["params"])):
            record = records.get(first + position)
            if record is not None:
                parameters[str(position)] = _as_tensors(record, result["state"].get(first + position, {}))
        general = {"version": VERSION, "effective_steps": effective_steps}
        device = next((each["settings"].device for each in parameters.values()), torch.device("cpu"))
        group[KEY] = {"general": _as_bytes(general, device), "parameters": parameters}


def split(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part a saved state_dict into the wrapped optimizer's own and ours.

    Returns:
        The optimizer's own, and {"effective_steps": ..., "parameters": {index: record}}; empty where there is
        nothing of ours. Records that plain steps have outdated are left out.

    Raises:
        PolicyError: a newer version saved it, or a tensor did not come through.
    """
    groups = state_dict["param_groups"]
    own = {**state_dict, "param_groups": [{k: v for k, v in group.items() if k != KEY} for group in groups]}
    saved: dict[str, Any] = {}
    parameters: dict[int, Record] = {}
    for first, group in _with_first_index(groups):
        if KEY not in group:
            continue
        general = _as_object(group[KEY]["general"])
        if general["version"] > VERSION:
            raise PolicyError(
                f"{KEY}: saved by a newer gradpolicy (format {general['version']}, known: {VERSION})"
            )
        saved["effective_steps"] = general["effective_steps"]
        for position, tensors in group[KEY].get("parameters", {}).items():
            index = first + int(position)
            record = _as_record(tensors)
            if not _is_outdated(own["state"].get(index, {}), record.pop("mark", None)):
                parameters[index] = record
    return own, {**saved, "parameters": parameters} if saved else {}


def _with_first_index(groups: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Each group, and the index of its first parameter."""
    counts = [len(group["params"]) for group in groups]
    return [(sum(counts[:place]), group) for place, group in enumerate(groups)]


def _as_tensors(record: Record, state: dict[str, Any]) -> dict[str, Tensor]:
    ages = record["ages"]
    settings = {key: value for key, value in record.items() if key != "ages"}
    settings |= {"ages_shape": list(ages.shape), "mark": None if is_sharded(ages) else _mark(state)}
    flat = ages if is_sharded(ages) else ages.reshape(-1)
    return {"ages": flat, "settings": _as_bytes(settings, ages.device)}


def _as_record(tensors: dict[str, Tensor]) -> Record:
    """Puts a record together again.

    Raises:
        PolicyError: the ages are missing, or have another size.
    """
    settings = _as_object(tensors["settings"])
    ages, shape = tensors.get("ages"), settings.pop("ages_shape")
    if ages is None or ages.numel() != prod(shape):
        raise PolicyError(
            f"{KEY}: the saved ages of shape {tuple(shape)} did not come through: "
            "torch.distributed.checkpoint.load reads what its target has, too; "
            "set masks of the saved shapes before the target's state is asked for"
        )
    return {**settings, "ages": ages if is_sharded(ages) else ages.reshape(shape)}


def _as_bytes(value: dict[str, Any], device: torch.device) -> Tensor:
    """JSON as a uint8 tensor, padded with spaces."""
    content = json.dumps(value).encode()
    content = content.ljust(-(-len(content) // _TEXT_BYTES) * _TEXT_BYTES)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _as_object(content: Tensor) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(content.cpu().numpy().tobytes().decode())
    return loaded


def _mark(state: dict[str, Any]) -> int:
    """A checksum of some values of each part of a parameter's state."""
    mark = 0
    for key in sorted(state):
        value = state[key]
        if isinstance(value, Tensor):
            if not value.dim() and key != "step":
                continue  # torch casts what it counts beside the steps to the parameter's dtype
            places = torch.arange(0, value.numel(), max(value.numel() // _SAMPLE, 1), device=value.device)
            sample = value[torch.unravel_index(places, value.shape)] if value.dim() else value.reshape(1)
            content = sample.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        else:
            content = repr(value).encode()
        mark = zlib.crc32(content, mark)
    return mark


def _is_outdated(state: dict[str, Any], mark: int | None) -> bool:
    """Whether a state has changed since its mark was made; not known where it is missing or sharded."""
    sharded = any(isinstance(value, Tensor) and is_sharded(value) for value in state.values())
    return mark is not None and bool(state) and not sharded and _mark(state) != mark
