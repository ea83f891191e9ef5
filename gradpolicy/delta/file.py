"""Delta files: safetensors, with the base's fingerprints and a checksum in the header.

Tensors, for each tensor NAME that changed:

- ``values:NAME``: the base's values and the new ones; see :class:`gradpolicy.delta.change.TensorChange`;
- ``gaps:NAME``: the lines that they belong to; see :func:`gradpolicy.delta.change.encode`;
- instead of both ``whole:NAME``, for a tensor that is replaced whatever the base has: the new values.

Metadata: ``format``; ``base``: JSON, the digest, dtype and shape of every tensor of the base; ``same``: JSON,
names that share the tensor of another name; ``checksum``: over all of this.

A file may be untrusted: all content is validated, and no code in it is run.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from gradpolicy.checks import check_free
from gradpolicy.delta.change import TensorChange, decode, encode, widths_of
from gradpolicy.delta.state import DTYPES, Print, Prints, content_of, fingerprint, tensors_of
from gradpolicy.errors import PolicyError, brief, shown, under
from gradpolicy.files import atomic_open, parse_json
from gradpolicy.tensors.checkpoint_file import check_kind, read_file

FORMAT = "gradpolicy.delta 2"
# The metadata that marks a delta, of any version.
DELTA_MARK = ("format", "gradpolicy.delta")
_VALUES, _GAPS, _WHOLE = "values", "gaps", "whole"
_LARGEST = 2**63 - 1
Content = TypeVar("Content")


@dataclass(frozen=True, eq=False)
class Delta:
    """The content of a file.

    Args:
        base: The fingerprint of each tensor of the base, in the order of their names.
        changes: The changes, by the tensor's name. Names that share a tensor share a change.
        replaced: Further tensors, which are written whatever a model has; `base` does not have them.
        tied: Names of tensors, changed or not, that are the tensor of another name.
    """

    base: Prints
    changes: Mapping[str, TensorChange]
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the full base."""
        return fingerprint(self.base)


def write(path: str | Path, delta: Delta) -> None:
    """Write a file; an existing delta is replaced when the new one is complete.

    Raises:
        PolicyError: If it cannot be written, or another file exists.
    """
    tensors: dict[str, Tensor] = {}
    for name, change in delta.changes.items():
        if name not in delta.tied:
            tensors[f"{_VALUES}:{name}"] = change.values.contiguous()
            tensors[f"{_GAPS}:{name}"] = encode(change.lines)
    # A copy each, as the format does not support tensors that share memory.
    tensors.update({f"{_WHOLE}:{name}": tensor.clone() for name, tensor in delta.replaced.items()})
    metadata = {"format": FORMAT, "base": compact(delta.base), "same": compact(delta.tied)}
    write_as(path, tensors, metadata, DELTA_MARK)


def write_as(
    path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str], mark: tuple[str, str] | None
) -> None:
    """Write a file for :func:`read_as`, with a checksum; see :func:`write_safetensors`."""
    write_safetensors(path, tensors, {**metadata, "checksum": _checksum(tensors, metadata)}, mark)


def check_replaceable(path: str | Path, mark: tuple[str, str] | None = DELTA_MARK) -> None:
    """Check that writing a file does not replace a file of another kind.

    Args:
        path: The file.
        mark: The metadata of files that may be replaced; None: no file may.

    Raises:
        PolicyError: If another file exists.
    """
    kind = None if mark is None else "delta"
    check_free("delta", Path(path), kind, lambda found: mark is not None and _has_mark(found, mark))


def _has_mark(path: Path, mark: tuple[str, str]) -> bool:
    try:
        return _load(path)[1].get(mark[0], "").startswith(mark[1])
    except PolicyError:
        return False


def write_safetensors(
    path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str], mark: tuple[str, str] | None
) -> None:
    """Write a safetensors file, completely or not at all.

    Args:
        path: The file; see :func:`check_replaceable`.
        tensors: The tensors.
        metadata: The metadata in its header.
        mark: The metadata of files that may be replaced.

    Raises:
        PolicyError: If it cannot be written, or another file exists.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with atomic_open(Path(path)) as file:
            save_file(tensors, file.name, metadata)
            _sort_metadata(Path(file.name))
            # safetensors creates files that only their owner can read.
            os.chmod(file.name, os.fstat(file.fileno()).st_mode)
            check_replaceable(path, mark)
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"delta: {path} cannot be written: {brief(str(error), most=120)}") from error


def _sort_metadata(path: Path) -> None:
    """Sort the metadata in a header, which safetensors writes in random order (its issue 584)."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        file.seek(8)
        file.write(text.ljust(size))


def read(path: str | Path) -> Delta:
    """Read a file and check all its content.

    Raises:
        PolicyError: If it cannot be read, is not a delta, or is damaged.
    """
    return read_as(path, FORMAT, _checked)


def read_as(
    path: str | Path, form: str, checked: Callable[[dict[str, Tensor], dict[str, str]], Content]
) -> Content:
    """Return the validated content of a file of a format.

    Args:
        path: The file.
        form: The format in its metadata.
        checked: Returns the content of tensors and metadata; a ValueError, whose message is a clause, if they
            are damaged.

    Raises:
        PolicyError: If it cannot be read, has another format, or is damaged.
    """
    tensors, metadata = _load(path)
    given = metadata.get("format", "")
    if given != form:
        other = f": it is {shown(given)}, and {form!r} is read" if given.startswith("gradpolicy") else ""
        raise PolicyError(f"delta: {path} is no file of {form.split()[0]}{other}")
    try:
        if metadata.pop("checksum", None) != _checksum(tensors, metadata):
            raise ValueError("its content differs from its checksum")
        return checked(tensors, metadata)
    except ValueError as error:
        raise PolicyError(f"delta: {path} is damaged: {brief(str(error), most=120)}") from error


def _load(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Raises:
        PolicyError: If it cannot be read, or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    check_kind(Path(path), "delta")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except OSError as error:
        raise PolicyError(f"delta: {path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise PolicyError(f"delta: {path} is damaged: {brief(str(error), most=120)}") from error


def _checked(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Delta:
    """Return the validated content of a file.

    Raises:
        ValueError: If it is damaged; the message is a clause that follows "is damaged: ".
    """
    base = {name: _print(name, entry) for name, entry in table(metadata, "base").items()}
    changes, replaced = {}, {}
    for key in tensors:
        kind, _, name = key.partition(":")
        if kind == _WHOLE and name not in base:
            replaced[name] = tensors[key]
            continue
        complete = {f"{_VALUES}:{name}", f"{_GAPS}:{name}"} <= tensors.keys()
        if kind not in (_VALUES, _GAPS) or name not in base or not complete:
            raise ValueError(f"it holds {shown(key)}, which belongs to no tensor of the base")
        with under(shown(name)):
            changes[name] = _change(base[name], tensors[f"{_VALUES}:{name}"], tensors[f"{_GAPS}:{name}"])
    tied = table(metadata, "same")
    for name, owner in tied.items():
        valid = isinstance(owner, str) and owner in base and owner not in tied and name not in changes
        if not (valid and base.get(name) == base[owner]):
            raise ValueError(f"{shown(name)} cannot be the same as {shown(owner)}")
    changes.update({name: changes[owner] for name, owner in tied.items() if owner in changes})
    return Delta(base, dict(sorted(changes.items())), dict(sorted(replaced.items())), tied)


def table(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    """Return the JSON table under a key of the metadata.

    Raises:
        ValueError: If there is none.
    """
    try:
        return parse_json(metadata.get(key, "").encode(), dict[str, Any])
    except ValueError as error:
        raise ValueError(f"its metadata {key!r} cannot be read, it is no table: {error}") from error


def _print(name: str, entry: Any) -> Print:
    match entry:
        case [str(digest), str(kind), shape] if kind in DTYPES and is_shape(shape):
            return Print(digest, kind, tuple(shape))
    raise ValueError(f"it describes the base's {shown(name)} as {shown(entry)}")


def is_shape(value: Any) -> bool:
    """Return True for a list of sizes, as JSON has a shape."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _LARGEST for size in value)


def _change(of: Print, values: Tensor, gaps: Tensor) -> TensorChange:
    if values.dtype != DTYPES[of.dtype]:
        raise PolicyError(f"its values are {values.dtype}, the base's are {of.dtype}")
    shape = tuple(values.shape)
    if not values.numel() or len(shape) != 3 or shape[0] != 2 or shape[2] not in widths_of(of.shape):
        raise PolicyError(f"its values have the shape {shape}, which no lines of {of.shape} have")
    lines = decode(gaps, math.prod(of.shape) // shape[2])
    if len(lines) != shape[1]:
        raise PolicyError(f"its values have the shape {shape}, for {len(lines)} lines")
    return TensorChange(of.shape, lines, values)


def compact(value: Mapping[str, Any]) -> str:
    """Return a table as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    found = hashlib.blake2b(json.dumps(sorted(metadata.items())).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(content_of(tensor))
    return found.hexdigest()


# ---- files of weights

ENDING = ".safetensors"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state_dict, without running code from the file.

    Args:
        path: A ``.safetensors`` file, or a file of ``torch.save`` with a state_dict or a checkpoint that has
            one as ``state_dict``, like Lightning's.

    Raises:
        PolicyError: If it cannot be read, or has no weights.
    """
    path = Path(path)
    if path.suffix == ENDING:
        return tensors_of(_load(path)[0])
    found = read_file(path, "delta")
    found = found.get("state_dict", found) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise PolicyError(f"delta: {path} has no weights")
    return tensors_of(found)


def write_weights(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Write a state_dict as a safetensors file.

    Args:
        path: The file, which must not exist.
        tensors: The state_dict.

    Raises:
        PolicyError: If it cannot be written, has another extension, or already exists.
    """
    path = Path(path)
    if path.suffix != ENDING:
        raise PolicyError(f"delta: {path} must end with {ENDING}, the format that is written")
    seen: set[int] = set()
    alone = {}
    for name, tensor in tensors.items():
        # The format does not support tensors that share memory.
        alone[name] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    # transformers does not read files without the name of the framework.
    write_safetensors(path, alone, {"format": "pt"}, None)
