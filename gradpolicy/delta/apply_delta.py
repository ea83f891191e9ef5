"""Apply a delta file to a model, and revert it."""

from pathlib import Path

from torch import nn

from gradpolicy.delta.change import BASE, NEW
from gradpolicy.delta.file import read
from gradpolicy.delta.state import (
    DTYPES,
    State,
    check_same_tensors,
    full_cpu,
    overwrite,
    print_of,
    tensors_of,
)
from gradpolicy.errors import PolicyError, shortened


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
