"""Write a delta file: the differences of a model from its base."""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradpolicy.delta.change import TensorChange, difference
from gradpolicy.delta.file import Delta, check_replaceable, write
from gradpolicy.delta.info import Info, describe
from gradpolicy.delta.state import Print, State, check_same_tensors, full_cpu, print_of, tensors_of
from gradpolicy.errors import PolicyError, shown
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
    tied: dict[tuple[object, ...], tuple[Print, TensorChange | None]] = {}
    for name, tensor in after.items():
        old = before[name]
        if (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            raise PolicyError(
                f"delta: {shown(name)} is {_kind(tensor)} in the model and {_kind(old)} in the base"
            )
        old = full_cpu(old)
        prints[name] = print_of(old)
        former, change = tied.get(memory_of(tensor), (None, None))
        if former != prints[name]:
            change = difference(old, full_cpu(tensor))
            tied.setdefault(memory_of(tensor), (prints[name], change))
        if change is not None:
            changes[name] = change
    delta = Delta(prints, changes, replaced)
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
