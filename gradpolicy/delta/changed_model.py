"""Saves the changes of a model in a file, applies and reverts them."""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradpolicy.delta.change import BASE, NEW, TensorChange, difference
from gradpolicy.delta.file import Delta, check_replaceable, read, write
from gradpolicy.delta.info import Info, describe
from gradpolicy.delta.state import (
    DTYPES,
    Print,
    State,
    check_same_tensors,
    full_cpu,
    overwrite,
    print_of,
    tensors_of,
)
from gradpolicy.errors import PolicyError, shortened, shown
from gradpolicy.tensors.sharding import local_shard
from gradpolicy.where import match_any


def save(
    path: str | Path,
    model: nn.Module | State,
    base: nn.Module | State,
    *,
    replaces: str | Iterable[str] = (),
) -> Info:
    """Write a file with the changes of parameters and buffers from a base to a model.

    Args:
        path: The safetensors file. An existing delta is replaced, but no other file.
        model: The model after the change. If it is sharded, every process must call this.
        base: The model before the change, with the same names, dtypes and shapes.
        replaces: Globs of tensors that are saved in full, such as a new head: :func:`gradpolicy.delta.apply`
            writes them whatever the model holds, and :func:`gradpolicy.delta.revert` leaves them. The base
            need not have them.

    Returns:
        The content of the file.

    Raises:
        PolicyError: If names, dtypes or shapes differ, the base is the model itself, a pattern matches
            nothing, or the file cannot be written or is another kind of file.
    """
    check_replaceable(path)
    after, before = tensors_of(model), tensors_of(base)
    chosen = match_any(replaces, after, "delta: replaces: tensor")
    replaced = {name: full_cpu(after.pop(name)) for name in sorted(chosen)}
    before = {name: tensor for name, tensor in before.items() if name not in chosen}
    check_same_tensors(after, before, "delta: the model", "the base")
    if after and all(memory_of(tensor) == memory_of(before[name]) for name, tensor in after.items()):
        raise PolicyError(
            "delta: the base shares the model's memory: keep a copy before training, such as "
            "copy.deepcopy(model.state_dict())"
        )
    prints: dict[str, Print] = {}
    changes: dict[str, TensorChange] = {}
    owners: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in after.items():
        old = before[name]
        if (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            raise PolicyError(
                f"delta: {shown(name)} is {_kind(tensor)} in the model and {_kind(old)} in the base"
            )
        old = full_cpu(old)
        prints[name] = print_of(old)
        owner = owners.setdefault(memory_of(tensor), name)
        if owner != name and prints[owner] == prints[name]:
            tied[name], change = owner, changes.get(owner)
        else:
            change = difference(old, full_cpu(tensor))
        if change is not None:
            changes[name] = change
    delta = Delta(prints, changes, replaced, tied)
    write(path, delta)
    return describe(path, delta)


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return the location of a tensor in memory, which is the same for tied names, on every process.

    If a process has no entries of it, the location is that of the storage, so that all processes gather the
    same tensors.
    """
    local = local_shard(tensor)
    where = local.data_ptr() if local.numel() else StorageWeakRef(local.untyped_storage()).cdata
    return local.device, where, tuple(tensor.shape), local.stride(), tensor.dtype


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


# ---- apply and revert


def apply(model: nn.Module | State, path: str | Path) -> None:
    """Apply a file's changes to its base, in place.

    Nothing is written unless every parameter and buffer has the base's bits; replaced tensors may have any.

    Args:
        model: The base, as a module or a state_dict. If it is sharded, every process must call this.
        path: A file of :func:`gradpolicy.delta.save` or :func:`gradpolicy.delta.merge`.

    Raises:
        PolicyError: If the file cannot be read, is damaged, or has another base; names the tensors that
            differ.
    """
    _move(model, path, BASE, NEW)


def revert(model: nn.Module | State, path: str | Path) -> None:
    """Revert a file's changes, in place, which restores the bits of the base.

    Nothing is written unless the result is the base. Replaced tensors are left as they are.

    Args:
        model: The result of :func:`gradpolicy.delta.apply`, as a module or a state_dict.
        path: The same file.

    Raises:
        PolicyError: If the file cannot be read, is damaged, or the model is not its base with its changes;
            names the tensors that differ.
    """
    _move(model, path, NEW, BASE)


def _move(model: nn.Module | State, path: str | Path, start: int, end: int) -> None:
    """Write the values of one side (old or new) if the model has the values of the other side."""
    delta = read(path)
    tensors = tensors_of(model)
    check_same_tensors(tensors, [*delta.base, *delta.replaced], "delta: the model", f"the base of {path}")
    other_base, other_side = [], []
    for name, tensor in tensors.items():
        replaced, change = delta.replaced.get(name), delta.changes.get(name)
        expected = delta.base[name] if replaced is None else print_of(replaced)
        if (tuple(tensor.shape), tensor.dtype) != (expected.shape, DTYPES[expected.dtype]):
            other_base.append(f"{name} (not {expected.dtype} {list(expected.shape)})")
            continue
        if replaced is not None:
            continue
        found = full_cpu(tensor)
        if print_of(found if change is None else change.written_to(found, BASE)) != expected:
            other_base.append(name)
        elif change is not None and not change.is_in(found, start):
            other_side.append(name)
    if other_base:
        verb = "differs" if len(other_base) == 1 else "differ"
        raise PolicyError(
            f"delta: {path} has another base ({delta.fingerprint}) than the model: "
            f"{shortened(other_base)} {verb}"
        )
    if other_side:
        applied = " (is it applied already?)" if len(other_side) == len(delta.changes) else ""
        needs = f"needs its base, and the model has changed{applied}"
        state = needs if start == BASE else "is not applied to the model"
        raise PolicyError(f"delta: {path} {state}: see {shortened(other_side)}")
    for name, change in delta.changes.items():
        overwrite(tensors[name], change.written_to(full_cpu(tensors[name]), end))
    for name, values in (delta.replaced if end == NEW else {}).items():
        overwrite(tensors[name], values)
