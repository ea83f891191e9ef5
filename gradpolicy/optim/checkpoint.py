"""The record of each parameter's mask and ages in a state_dict.

    {"state": ..., "param_groups": [{..., "gradpolicy": {"general": ..., "parameters": {index: record}}}]}

There is one format. Its "state" is the wrapped optimizer's own. What a parameter keeps of active entries
alone ("drop") or in another dtype (master weights) is in its record instead: a plain optimizer would cast it,
or step beyond its end, and raises an error where it finds none. With ``dense=True`` and for sharded
parameters all is in the optimizer's own state, and any state that does not exist yet is initial.

The records are in the first param group. Each has its settings, as text in bytes; signed ages; perhaps state;
and with state of active entries the index of these. They pass through what other code does to state_dicts:

- `torch.distributed.checkpoint` moves tensors of at least one dimension, in the sizes of the loading
  optimizer, so that text is padded. With `full_state_dict=True` it adds what only the loading optimizer has:
  settings name the state that was saved, and any other is ignored.
- A plain torch optimizer that has loaded a group saves all of it again, whatever steps it has made since. So
  settings have a checksum of the state that they belong to.
- `flatten_optimizer_state_dict=True` would lose the groups, and with them the records. Torch refuses to
  flatten a state with a list in it, so there is an empty one.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradpolicy.checks import LARGEST_SIZE, check_integer, check_number, check_setting, plain_number
from gradpolicy.errors import PolicyError, shown, under
from gradpolicy.optim.masked_parameter import MaskedParameter, Options
from gradpolicy.optim.put_back import first_state
from gradpolicy.optim.shapes import local_mask
from gradpolicy.optim.update_rules import is_torchs_own
from gradpolicy.optim.update_rules.base import step_count
from gradpolicy.optim.update_rules.master_weights import HIGH, LOW
from gradpolicy.tensors.checkpoint_file import form_of
from gradpolicy.tensors.mask import pack, unpack
from gradpolicy.tensors.sharding import is_sharded, plain_parts

Record = dict[str, Any]
"""A record as a dict: its settings, "ages" and "values", the state that is not in the optimizer's."""
KEY = "gradpolicy"
VERSION = 7
_SAMPLED = 64
"""Number of values of a tensor that its checksum covers."""
_TEXT_BYTES = 512


# --- saving


def save(
    inner: torch.optim.Optimizer, masked: Sequence[MaskedParameter], effective_steps: int, *, dense: bool
) -> dict[str, Any]:
    """Return the wrapped optimizer's state_dict, with the records in its param groups.

    Args:
        inner: The wrapped optimizer.
        masked: Its parameters with their masks, in the order of its groups.
        effective_steps: Its count of updates.
        dense: True for state that torch alone can load.
    """
    result, records = inner.state_dict(), {}
    # Torch loads a full state_dict only into state of the same names.
    is_new = not effective_steps and not any(inner.state.values())
    state: dict[int, dict[str, Any]] = {}
    for index, each in enumerate(masked):
        records[str(index)], own = _saved(each, dense=dense, is_new=is_new)
        if own or index in result["state"]:
            state[index] = own
    # Processes gather shards in this order; the order of first updates may differ between them.
    result["state"] = state | {key: own for key, own in result["state"].items() if key not in state}
    general = {"version": VERSION, "effective_steps": effective_steps}
    device = masked[0].ages.device if masked else torch.device("cpu")
    result["param_groups"][0][KEY] = {"general": _as_bytes(general, device), "parameters": records}
    return result


def _saved(masked: MaskedParameter, *, dense: bool, is_new: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a parameter's record as tensors, and the optimizer's state as it is saved."""
    # Follows the parameter first, or raises if that has changed.
    signed, values, rule = masked.signed_ages(), masked.values, masked.rule
    shape, sharded = masked.mask_shape, is_sharded(masked.parameter)
    dense = dense or sharded
    fills = dense or (is_new and masked.parameter.requires_grad)
    packed = masked.ages.stored is not None and not fills
    if fills:
        state = filled(masked)
    else:
        # A name with None is of state that was dropped.
        dropped = {name: None for name, value in values.items() if value is None}
        state = dropped | (values if packed else masked.dense())
    carries = packed or (masked.has_master_weights and not dense)
    names = rule.names if rule is not None and carries else ()
    carried = {name: state[name] for name in names if state.get(name) is not None}
    state = {name: value for name, value in state.items() if name not in carried}
    settings = {
        "mask_shape": None if shape is None else list(shape),
        "updates": masked.updates,
        "had_mask": masked.had_mask,
        "begun": bool(values) or sharded,
        **masked.options._asdict(),
        "ages_shape": list(signed.shape),
        "packed": packed,
        "values": list(carried),
        "state": list(state),
        "mark": None if sharded else _checksum(state),
    }
    tensors: dict[str, Any] = {"settings": _as_bytes(settings, masked.ages.device)}
    if carried:
        tensors["values"] = carried
    if packed:
        tensors["index"] = pack(signed > 0)
        signed = signed[signed > 0]
        signed = signed[:1] if bool((signed == signed[:1]).all()) else signed
    # Gloo gathers no 16-bit numbers.
    tensors["ages"] = signed.int() if sharded else signed.reshape(-1)
    return tensors, {**state, KEY: []} if state else state


def filled(masked: MaskedParameter) -> dict[str, Any]:
    """Return the dense state of a parameter; what does not exist yet is initial."""
    state, inner = masked.dense(), masked.wrapped.optimizer
    if masked.rule is not None:
        state = {**masked.initial(masked.group), **state}
        return masked.rule.dense_state(state, masked.parameter.detach())
    if not state and (is_sharded(masked.parameter) or is_torchs_own(inner)):
        return first_state(inner, masked.group, masked.parameter) or {}
    return state


def _as_bytes(value: dict[str, Any], device: torch.device) -> Tensor:
    """Return JSON as a uint8 tensor, padded with spaces."""
    text = json.dumps(value).encode()
    text = text.ljust(-(-len(text) // _TEXT_BYTES) * _TEXT_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


# --- loading


def copied(state_dict: Any) -> dict[str, Any]:
    """Return a shallow copy of a state_dict.

    Raises:
        PolicyError: If it is none of an optimizer.
    """
    if not isinstance(state_dict, Mapping) or not state_dict.get("param_groups"):
        raise PolicyError(f"load_state_dict: expected a dict with 'param_groups', got {shown(state_dict)}")
    return dict(state_dict)


def split(state_dict: dict[str, Any]) -> tuple[dict[str, Any], int | None, dict[int, Record]]:
    """Separate a saved state_dict into that of the wrapped optimizer and the records.

    Returns:
        The optimizer's state_dict; the number of updates, if it was saved; and the records by the index of
        the parameter, without those that plain steps have outdated.

    Raises:
        PolicyError: If another version saved it, a tensor was not loaded, or the file is damaged.
    """
    groups, steps, records = state_dict["param_groups"], None, {}
    # Torch.distributed.checkpoint saves state by the parameters' names.
    keys, state = _keys(state_dict), dict(state_dict.get("state", {}))
    saved = next((group[KEY] for group in groups if KEY in group), None)
    if saved is not None:
        steps = _read_general(saved["general"])
    for number, tensors in saved["parameters"].items() if saved is not None else ():
        index = int(number)
        try:
            record = _read_record(tensors)
        except (RuntimeError, IndexError, LookupError, TypeError, ValueError) as error:
            raise PolicyError(f"the record of parameter {index} is damaged ({error})") from error
        key = keys[index] if 0 <= index < len(keys) else None
        own = {name: value for name, value in state.get(key, {}).items() if name != KEY}
        if isinstance(rest := own.get(HIGH), Tensor) and rest.dtype != torch.uint8:
            raise PolicyError(
                f"parameter {index} was saved with master_weights=True, and torch rounds what a plain "
                "optimizer loads; load the state into the MaskedOptimizer, within gradpolicy.training"
            )
        if key is None or not _is_outdated(record, own):
            records[index] = record
            own = {name: own[name] for name in record["state"] if name in own}
            if HIGH in own:  # torch would cast it, and the moments beside it, to the parameter's dtype
                entries = [name for name, value in own.items() if isinstance(value, Tensor) and value.dim()]
                record["values"] |= {name: own.pop(name) for name in entries}
        if key in state:
            state[key] = own
    plain = [{name: value for name, value in group.items() if name != KEY} for group in groups]
    return {**state_dict, "state": state, "param_groups": plain}, steps, records


def _keys(state_dict: dict[str, Any]) -> list[Any]:
    """Return the keys of the parameters in the state, in the order of the groups."""
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def _read_general(saved: Tensor) -> int:
    """Return the number of updates."""
    general = _from_bytes(saved)
    if general["version"] != VERSION:
        kind = "newer" if general["version"] > VERSION else "older"
        raise PolicyError(
            f"{KEY}: saved by a {kind} gradpolicy (expected format {VERSION}, got {general['version']})"
        )
    return check_integer("the saved number of steps", general["effective_steps"], least=0, most=LARGEST_SIZE)


def _read_record(tensors: dict[str, Any]) -> Record:
    """Return a record with the ages of all entries."""
    record: Record = _from_bytes(tensors["settings"])
    ages, shape = tensors.get("ages"), record["ages_shape"]
    if ages is None or not (record["packed"] or ages.numel() == math.prod(shape)):
        raise PolicyError(
            f"{KEY}: the saved ages of shape {tuple(shape)} did not come through: "
            "torch.distributed.checkpoint.load reads what its target has, too; "
            "set masks of the saved shapes before the target's state is asked for"
        )
    if record["packed"]:
        flags = unpack(tensors["index"], math.prod(shape)).view(shape)
        ages = ages.new_full(shape, -1).masked_scatter_(flags, ages.expand(int(flags.count_nonzero())))
    record["values"] = {name: tensors.get("values", {}).get(name) for name in record["values"]}
    return {**record, "ages": ages if is_sharded(ages) else ages.reshape(shape)}


def _from_bytes(saved: Tensor) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(saved.cpu().numpy().tobytes().decode())
    return loaded


def _is_outdated(record: Record, state: dict[str, Any]) -> bool:
    """Return True if a state has changed since its record was made, by steps of a plain torch optimizer."""
    tensors = [value for value in (record["ages"], *state.values()) if isinstance(value, Tensor)]
    if any(map(is_sharded, tensors)):
        # The record is of the optimizer that loads a full state_dict without records.
        return not record.get("updates") and step_count(state) > 0
    saved = {name: value for name, value in state.items() if name in record["state"]}
    added = {name: value for name, value in state.items() if name not in saved}
    if saved and record.get("mark") not in (None, _checksum(saved)):
        return True
    if "step" in added:
        return step_count(added) > 0
    return any(isinstance(value, Tensor) and value.dim() and bool(value.any()) for value in added.values())


def _checksum(state: dict[str, Any]) -> int:
    """Return a checksum of some values of each tensor of a parameter's state."""
    sampled: list[Any] = []
    for key, value in sorted(state.items()):
        if not isinstance(value, Tensor):
            sampled.append(value)
        elif value.dim() or key == "step":  # torch casts other numbers to the parameter's dtype
            values = plain_parts(value)[0].detach().flatten()
            sampled.append(values[:: max(len(values) // _SAMPLED, 1)].tolist())
    return zlib.crc32(repr(sampled).encode())


def _carried(record: Record, masked: MaskedParameter) -> dict[str, Any]:
    """Return the state in a record as the optimizer would have it, with 0 for entries without.

    Raises:
        PolicyError: If it does not belong to the saved mask.
    """
    parameter, saved = masked.parameter, record["values"]
    wide = {name: None if value is None else value.to(parameter.device) for name, value in saved.items()}
    if not record["packed"]:
        return wide
    mask = (record["ages"] > 0).expand(masked.shape)
    mask = mask.unsqueeze(-1).expand(*masked.shape, 2) if parameter.is_complex() else mask
    active = int(mask.count_nonzero())
    for name, value in wide.items():
        if value is None or value.numel() != active:
            raise PolicyError(
                f"{masked.name}: its saved mask and state do not belong together (expected {active} values "
                f"of {name!r}, found {0 if value is None else value.numel()}); the file is damaged"
            )
        value = value if HIGH in wide else value.to(parameter.dtype.to_real())
        full = value.new_zeros(mask.shape).masked_scatter_(mask.to(value.device), value)
        wide[name] = masked.shaped(local_mask(full, parameter))
    return wide


def fitting_records(
    state_dict: dict[str, Any], records: dict[int, Record], masked: Sequence[MaskedParameter]
) -> dict[int, Record]:
    """Check a split state_dict before anything of it is loaded; return its records.

    Raises:
        PolicyError: If something is missing or damaged, or belongs to another parameter or optimizer.
    """
    keys = _keys(state_dict)
    for index in records:
        if not 0 <= index < min(len(masked), len(keys)):
            raise PolicyError(
                f"the state_dict has a mask for parameter {index}; "
                f"the wrapped optimizer has {len(masked)}, counted from 0"
            )
    if len(keys) != len(masked):
        raise PolicyError(f"the state_dict is of {len(keys)} parameters, and the optimizer has {len(masked)}")
    groups = [group for group in state_dict["param_groups"] for _ in group["params"]]
    for index, (key, group, each) in enumerate(zip(keys, groups, masked, strict=True)):
        _check_settings(group, each)
        state = state_dict["state"].get(key, {})
        if index in records:
            _check(records[index], each)
            state = {**state, **_carried(records[index], each)}
        elif lacking := [name for name in _needed(group, each) if state and state.get(name) is None]:
            _refuse(lacking[0], None, each)
        _check_state(state, each)
    return records


def _check_settings(group: dict[str, Any], masked: MaskedParameter) -> None:
    """Compare a saved param group with the optimizer's."""
    for name, like in masked.group.items():
        with under(f"the saved param group of {masked.name}"):
            if name in group and name not in ("params", "param_names"):
                check_setting(name, group[name], like)
                if name == "capturable" and group[name] and masked.parameter.device.type == "cpu":
                    raise PolicyError("capturable: expected False for parameters on a CPU, got True")
            # Torch adds flags that older versions have not saved.
            elif name in masked.wrapped.optimizer.defaults and not isinstance(like, bool | None):
                raise PolicyError(f"has no {name!r}")


def _check_state(state: Mapping[str, Any], masked: MaskedParameter) -> None:
    """Compare a parameter's saved state with what the optimizer keeps, as far as that is known."""
    likes = _likes(masked) if state else {}
    for key, value in state.items():
        like = likes.get(key)
        if not isinstance(key, str):
            _refuse(key, shown(value), masked)
        if key == "step" or (isinstance(like, Tensor) and not like.dim()):
            least, number = 0.0 if key == "step" else -math.inf, plain_number(value)
            check_number(f"{masked.name}: the saved {key!r}", number, least=least, below=LARGEST_SIZE)
        elif isinstance(like, Tensor) and value is not None:
            got = form_of(value) if isinstance(value, Tensor) else shown(value)
            if got != form_of(like):
                _refuse(key, got, masked)
            _check_finite(key, value, masked)


def _check_finite(key: str, value: Tensor, masked: MaskedParameter) -> None:
    """Check that a saved state is finite where the weight is.

    Where training has diverged neither is. Infinity may also be a square, of a state without negative values.

    Raises:
        PolicyError: If it is not.
    """
    weight = masked.parameter.detach()
    if is_sharded(weight) or value.is_complex() or value.shape != weight.shape:
        return
    wrong = ~value.isfinite() if bool((value < 0).any()) else value.isnan()
    count = int((wrong.to(weight.device) & weight.isfinite()).count_nonzero())
    if count:
        raise PolicyError(
            f"{masked.name}: the saved {key!r} is not finite in {count} entries whose weights are: the file "
            "is damaged, or the run has diverged, and its weights are to be loaded first"
        )


def _likes(masked: MaskedParameter) -> Mapping[str, Any]:
    """Return tensors with the shapes and dtypes of a parameter's state, as far as they are known."""
    parameter, inner = masked.parameter.detach(), masked.wrapped.optimizer
    if (rule := masked.wrapped.rule) is not None:
        rest = torch.empty(parameter.shape, dtype=torch.uint8, device="meta")
        likes = dict.fromkeys(rule.names, parameter) | dict.fromkeys((HIGH, LOW), rest)
        return masked.counts(masked.group, 0) | likes
    if not is_torchs_own(inner):
        return masked.dense()
    empty = (torch.zeros(parameter.shape, dtype=parameter.dtype, device=each) for each in ("meta", "cpu"))
    return next(filter(None, (first_state(inner, masked.group, each) for each in empty)), {})


def _needed(group: dict[str, Any], masked: MaskedParameter) -> Iterable[str]:
    """Return the names of the state without which a step of the optimizer fails."""
    if (rule := masked.wrapped.rule) is not None:
        return rule.state({**masked.group, **group})
    return _likes(masked) if is_torchs_own(masked.wrapped.optimizer) else ()


def _check(record: Record, masked: MaskedParameter) -> None:
    parameter, name = masked.parameter, masked.name
    for key in ("mask_shape", "updates", "had_mask", *Options._fields):
        if key not in record:
            raise PolicyError(f"{name}: its saved record has no {key!r}")
    check_integer(f"{name}: the saved 'updates'", record["updates"], least=0, most=LARGEST_SIZE)
    try:
        Options().changed(**{option: record[option] for option in Options._fields})
    except PolicyError as error:
        raise PolicyError(f"{name}: saved {error}") from None
    ages = record["ages"]
    if ages.is_floating_point() or ages.dtype == torch.bool:
        raise PolicyError(f"{name}: its saved ages are {ages.dtype}, not integers; the file is damaged")
    for what, shape in (("ages", ages.shape), ("mask", record["mask_shape"] or (1,) * parameter.dim())):
        fits = [size in (1, full) for size, full in zip(shape, parameter.shape, strict=False)]
        if len(shape) != parameter.dim() or not all(fits):
            _refuse(what, tuple(shape), masked)
    if not is_sharded(ages) and bool((ages == 0).any()):
        raise PolicyError(f"{name}: its saved ages have a 0, which no entry has; the file is damaged")


def _refuse(what: str, got: Any, masked: MaskedParameter) -> NoReturn:
    raise PolicyError(
        f"{masked.name}: expected the saved {what!r} to fit the parameter of shape "
        f"{tuple(masked.parameter.shape)}, got {got}; load what was saved of this model"
    )


def restore(masked: MaskedParameter, record: Record) -> None:
    """Restore a parameter's mask and ages from a record; its state is loaded already, as it was saved."""
    shape = record["mask_shape"]
    if carried := _carried(record, masked):
        masked.wrapped.optimizer.state.setdefault(masked.parameter, {}).update(carried)
    master = masked.options.master_weights or record["master_weights"]
    masked.restore(
        record["ages"],
        None if shape is None else tuple(shape),
        Options(record["frozen_state"], record["bias_correction"], master),
        updates=int(record["updates"]),
        begun=bool(record["begun"]),
    )
    masked.had_mask = record["had_mask"]
