"""Delta files as adapters of PEFT, and back: rows as TrainableTokens, entries as SHiRA.

A directory has ``adapter_config.json`` and ``adapter_model.safetensors`` in PEFT's format. The delta is
beside them, because an adapter has neither the old values nor the base's digests.

Source: peft 0.21.2, ``tuners/trainable_tokens`` and ``tuners/shira``.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradpolicy.checks import check_choice
from gradpolicy.delta.change import NEW, TensorChange
from gradpolicy.delta.changed_model import memory_of, save
from gradpolicy.delta.file import Delta, read, read_weights, write, write_safetensors
from gradpolicy.delta.info import Info, describe
from gradpolicy.delta.state import State, full_cpu, print_of, tensors_of
from gradpolicy.errors import PolicyError, brief, shortened, shown, under, unknown
from gradpolicy.files import write_text
from gradpolicy.tensors.checkpoint_file import check_kind
from gradpolicy.tensors.sharding import finite_everywhere

CONFIG, ADAPTER, DELTA = "adapter_config.json", "adapter_model.safetensors", "gradpolicy_delta.safetensors"
_TOKENS, _SHIRA = "TRAINABLE_TOKENS", "SHIRA"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
_ROWS, _SUMMANDS, _INDICES = "trainable_tokens_delta", "shira_weight", "shira_indices"
# PEFT wraps linear layers for SHiRA; a file does not say which weights are those of embeddings.
_EMBEDDING = re.compile(r"embed|\bwte\b|\bwpe\b")


class _Adapter(NamedTuple):
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def to_peft(path: str | Path, directory: str | Path) -> None:
    """Write a delta as an adapter that ``peft.PeftModel.from_pretrained(base, directory)`` loads.

    Rows become a TrainableTokens adapter if they are the same in each changed tensor and no module of these
    has a bias. Otherwise the entries of linear weights become a SHiRA adapter, and replaced tensors its
    ``modules_to_save``. On a CPU, and with PEFT's default ``autocast_adapter_dtype=True``, the weights then
    have the bits of the trained model; only a -0.0 of SHiRA becomes 0.0.

    Args:
        path: A file of :func:`gradpolicy.delta.save` or :func:`gradpolicy.delta.merge`, whose names are those
            of the model that PEFT gets.
        directory: A new or empty directory.

    Raises:
        PolicyError: If the file cannot be read, PEFT has no adapter for its changes (names the tensor and the
            reason), or the directory has files or cannot be written.
    """
    delta, folder = read(path), Path(directory)
    with under(f"delta.to_peft: {path}"):
        adapter = _adapter(delta)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise PolicyError(f"delta.to_peft: {folder} is not empty; it is kept, so name another directory")
        write(folder / DELTA, delta)
        write_safetensors(folder / ADAPTER, adapter.tensors, {"format": "pt"}, None)
        # PEFT finds an adapter by this file, so an interrupted call leaves none.
        write_text(folder / CONFIG, json.dumps(adapter.config, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise PolicyError(f"delta.to_peft: {folder} cannot be written: {error.strerror or error}") from error


def from_peft(directory: str | Path, path: str | Path, base: nn.Module | State | None = None) -> Info:
    """Write a TrainableTokens or SHiRA adapter as a delta.

    Args:
        directory: The directory of the adapter.
        path: The file. An existing delta is replaced, but no other file.
        base: The model without the adapter, as a module or a state_dict. A directory of :func:`to_peft` does
            not need it if the adapter is still the same: the file then equals the original byte for byte.

    Returns:
        The content of the file.

    Raises:
        PolicyError: If the adapter is of another type, damaged or does not fit the base, the base is needed,
            or the file cannot be written.
    """
    folder = Path(directory)
    adapter = _Adapter(_read_config(folder / CONFIG), read_weights(folder / ADAPTER))
    with under(f"delta.from_peft: {folder}"):
        if base is None:
            delta = _kept(folder / DELTA, adapter)
            write(path, delta)
            return describe(path, delta)
        trained, replaced = _with_adapter(adapter, tensors_of(base))
    return save(path, trained, base, replaces=replaced)


# ---- from a delta


def _adapter(delta: Delta) -> _Adapter:
    if not delta.changes:
        raise PolicyError("no tensor differs from the base")
    for name, change in delta.changes.items():
        if not (name.endswith(_WEIGHT) and len(change.shape) == 2):
            raise PolicyError(f"{shown(name)} changed; PEFT has rows and entries of weight matrices only")
    obstacle = _obstacle(delta)
    if obstacle is None:
        return _token_adapter(delta)
    for name in filter(_EMBEDDING.search, delta.changes):
        raise PolicyError(f"{shown(name)} is an embedding, which needs TrainableTokens, but {obstacle}")
    return _shira_adapter(delta)


def _obstacle(delta: Delta) -> str | None:
    """Return why a TrainableTokens adapter cannot hold the changes; None if it can."""
    first = next(iter(delta.changes))
    for name, change in delta.changes.items():
        bias = f"{_module(name)}.bias"
        if change.form == "entries":
            return f"{shown(name)} changed in single entries"
        if _rows(change) != _rows(delta.changes[first]):
            return f"{shown(name)} changed in other rows than {shown(first)}"
        if bias in delta.base or bias in delta.replaced:
            return f"PEFT would drop {shown(bias)} (peft issue 3649)"
    for name in delta.replaced:
        return f"{shown(name)}, which is replaced, cannot be saved there"
    return None


def _token_adapter(delta: Delta) -> _Adapter:
    names: dict[int, list[str]] = {}
    tensors = {}
    for name, change in delta.changes.items():
        names.setdefault(id(change), []).append(name)
        # PEFT expects a tied head's rows too, and safetensors a copy of them.
        rows = change.values[NEW].reshape(-1, change.shape[1]).clone()
        tensors[f"{_PREFIX}{_module(name)}.{_ROWS}"] = rows
    targets = []
    for tied in names.values():
        # PEFT needs the input embedding, and follows the tie to the head itself.
        found = [name for name in tied if len(tied) == 1 or _EMBEDDING.search(name)]
        if len(found) != 1:
            raise PolicyError(f"{shortened(tied)} share a tensor; it is unclear which is the input embedding")
        targets += found
    return _Adapter(_config(_TOKENS, targets, token_indices=_rows(change)), tensors)


def _shira_adapter(delta: Delta) -> _Adapter:
    if len({id(change) for change in delta.changes.values()}) < len(delta.changes):
        raise PolicyError(f"{shortened(list(delta.changes))}: SHiRA has no tied weights, and some are")
    terms = {name: _terms(name, change) for name, change in delta.changes.items()}
    rank = _rank({name: len(entries) for name, (entries, _) in terms.items()}, delta)
    tensors = {f"{_PREFIX}{name}": tensor for name, tensor in delta.replaced.items()}
    for name, (entries, summands) in terms.items():
        rows, columns = delta.changes[name].shape
        free = entries.new_ones(rows * columns, dtype=torch.bool).index_fill(0, entries, False)
        filling = free.nonzero().flatten()[: rank * (rows + columns) - len(entries)]
        entries = torch.cat([entries, filling])
        # Adding -0.0 changes no bit; adding 0.0 would turn -0.0 into 0.0.
        tensors[f"{_PREFIX}{_module(name)}.{_SUMMANDS}"] = torch.cat(
            [summands, summands.new_full((len(filling),), -0.0)]
        )
        indices = torch.stack([entries // columns, entries % columns])
        tensors[f"{_PREFIX}{_module(name)}.{_INDICES}"] = indices.to(torch.int32)
    modules = _replaced_modules(delta)
    return _Adapter(_config(_SHIRA, list(terms), r=rank, modules_to_save=modules or None), tensors)


def _terms(name: str, change: TensorChange) -> tuple[Tensor, Tensor]:
    """Return the entries and the summands whose sum with the base, in PEFT's arithmetic, is exact.

    PEFT adds in float32 (float64 for a base in float64), then rounds to the base's dtype. Where the sum is
    rounded, which can happen unless the old and the new value are within a factor of 2 of each other, a
    second summand with the same index follows. On a CPU, torch adds them in their order.
    """
    dtype = change.values.dtype
    base, new = change.values.reshape(2, -1).to(dtype if dtype == torch.float64 else torch.float32)
    summands = new - base
    rest = new - (base + summands)
    if not torch.equal((base + summands + rest).to(dtype), change.values[NEW].flatten()):
        raise PolicyError(f"{shown(name)} has values that no sum with the base gives (infinite or NaN)")
    entries, rounded = change.entries(), rest != 0
    return torch.cat([entries, entries[rounded]]), torch.cat([summands, rest[rounded]])


def _rank(summands: dict[str, int], delta: Delta) -> int:
    """Return SHiRA's r: every layer has r · (rows + columns) summands.

    Args:
        summands: The number of summands that each layer needs.
        delta: The changes of the layers.

    Raises:
        PolicyError: If no r has room for all changes and fits into every layer.
    """
    shapes = {name: delta.changes[name].shape for name in summands}
    needed = {name: math.ceil(summands[name] / sum(shape)) for name, shape in shapes.items()}
    allowed = {name: math.prod(shape) // sum(shape) for name, shape in shapes.items()}
    most, least = max(needed, key=needed.__getitem__), min(allowed, key=allowed.__getitem__)
    if needed[most] > allowed[least]:
        raise PolicyError(
            f"SHiRA has r · (rows + columns) entries in every layer: {shown(most)} needs r = {needed[most]}, "
            f"and {shown(least)} allows at most {allowed[least]}"
        )
    return needed[most]


def _replaced_modules(delta: Delta) -> list[str]:
    """Return the modules of the replaced tensors, which PEFT saves completely."""
    prefixes = tuple(sorted({name[: name.rfind(".") + 1] for name in delta.replaced}))
    for name in delta.base:
        if name.startswith(prefixes):
            raise PolicyError(f"PEFT replaces complete modules, but {shown(name)} is not replaced")
    return [prefix[:-1] for prefix in prefixes]


def _config(kind: str, names: list[str], **values: object) -> dict[str, Any]:
    # A regular expression, because PEFT matches a list with the ends of names.
    targets = "|".join(re.escape(_module(name)) for name in names)
    return {"peft_type": kind, "target_modules": targets, "inference_mode": True, **values}


def _rows(change: TensorChange) -> list[int]:
    return list(range(change.shape[0])) if change.form == "whole" else change.lines.tolist()


def _module(name: str) -> str:
    return name.removesuffix(_WEIGHT)


# ---- from an adapter


def _read_config(path: Path) -> dict[str, Any]:
    check_kind(path, "delta.from_peft")
    try:
        config = json.loads(path.read_bytes())
    # json raises RecursionError for deeply nested text.
    except (OSError, ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else brief(repr(error))
        raise PolicyError(f"delta.from_peft: {path} cannot be read: {why}") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    check_choice(f"delta.from_peft: peft_type in {path}", kind, (_TOKENS, _SHIRA))
    return config


def _kept(path: Path, found: _Adapter) -> Delta:
    """Return the delta that :func:`to_peft` has put beside an adapter, if the adapter is still the same."""
    if not path.exists():
        raise PolicyError(f"there is no {DELTA}, so the model without the adapter is needed as base")
    delta = read(path)
    if _content(found) != _content(_adapter(delta)):
        raise PolicyError("the adapter has changed since it was written, so its base is needed")
    return delta


def _content(adapter: _Adapter) -> tuple[object, object]:
    prints = {name: print_of(tensor) for name, tensor in adapter.tensors.items()}
    return adapter.config.get("token_indices"), prints


def _with_adapter(adapter: _Adapter, base: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the base's tensors with an adapter, and the names of those that it replaces."""
    trained = {name: full_cpu(tensor) for name, tensor in base.items()}
    memory = {name: memory_of(tensor) for name, tensor in base.items()}
    replaced = []
    for key, tensor in adapter.tensors.items():
        module, _, kind = key.removeprefix(_PREFIX).rpartition(".")
        if kind == _INDICES:
            continue
        name = f"{module}{_WEIGHT}" if kind in (_ROWS, _SUMMANDS) else f"{module}.{kind}"
        if name not in base:
            raise unknown("tensor", name, base)
        new, old = tensor, full_cpu(base[name])
        if tensor.is_complex() > old.is_complex() or not finite_everywhere([tensor]):
            raise PolicyError(f"{shown(key)}: expected finite real numbers")
        try:
            if kind == _ROWS:
                rows = tensor.new_tensor(adapter.config.get("token_indices"), dtype=torch.int64)
                _check_distinct("token_indices", rows, most=1)
                new = old.index_copy(0, rows, tensor.to(old.dtype))
            elif kind == _SUMMANDS:
                indices: Any = adapter.tensors.get(f"{_PREFIX}{module}.{_INDICES}")
                summands = torch.sparse_coo_tensor(indices, tensor, old.shape, check_invariants=True)
                _check_distinct(_INDICES, indices.T, most=2)  # two summands where a sum is rounded
                # The same operation as in PEFT, for the same bits.
                new = old.clone().add_(summands)
            else:
                replaced.append(name)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            reason = brief(str(error))
            raise PolicyError(f"{shown(name)} does not fit {list(old.shape)}: {reason}") from error
        trained.update({other: new for other in base if memory[other] == memory[name]})
    return trained, replaced


def _check_distinct(what: str, indices: Tensor, *, most: int) -> None:
    if indices.is_floating_point():
        raise TypeError(f"{what}: expected integers")
    if len(indices) and (counts := indices.unique(dim=0, return_counts=True)[1]).max() > most:
        raise ValueError(f"{what} has an index {int(counts.max())} times")
