"""Merge several delta files of one base."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from gradpolicy.delta.change import BASE, NEW, TensorChange, bits, of_entries
from gradpolicy.delta.file import Delta, check_replaceable, read, write
from gradpolicy.delta.info import Info, describe
from gradpolicy.errors import PolicyError, shortened, shown


def merge(paths: Sequence[str | Path], weights: Sequence[float], out: str | Path) -> Info:
    """Write a file with the weighted changes of several files.

    ``new = base + Σ_k weight_k · (new_k − base)``, in float64, then rounded to the tensor's dtype. An entry
    that only one file changes, with weight 1, gets the exact value of that file.

    Args:
        paths: Files with the same base.
        weights: A number for each.
        out: The file to write. An existing delta is replaced, but no other file.

    Returns:
        The content of the new file.

    Raises:
        PolicyError: If a file cannot be read or is damaged, the bases differ (names the tensors), a weight is
            not finite, a value would not be finite, a file replaces tensors, or `out` is of another kind.

    Source: task arithmetic; Ilharco et al. 2023, arXiv:2212.04089.
    """
    finite = [weight for weight in weights if isinstance(weight, int | float) and math.isfinite(weight)]
    if not paths or not len(weights) == len(finite) == len(paths):
        given = shown(list(weights))
        raise PolicyError(f"delta.merge: {len(paths)} files need as many weights, finite ones, got {given}")
    check_replaceable(out)
    deltas = [read(path) for path in paths]
    base = deltas[0].base
    for path, delta in zip(paths, deltas, strict=True):
        for name in delta.replaced:
            raise PolicyError(f"delta.merge: {path} replaces {shown(name)}, which is no change of its base")
        names = base.keys() | delta.base.keys()
        differing = sorted(name for name in names if base.get(name) != delta.base.get(name))
        if differing:
            raise PolicyError(
                f"delta.merge: {path} has another base than {paths[0]}: see {shortened(differing)}"
            )
    tied = dict(set.intersection(*(set(delta.tied.items()) for delta in deltas)))
    changes = {}
    for name in sorted({name for delta in deltas for name in delta.changes if name not in tied}):
        parts = [
            (delta.changes[name], float(weight))
            for delta, weight in zip(deltas, weights, strict=True)
            if name in delta.changes
        ]
        changes[name] = _merged(name, parts)
    # Names that share a tensor keep sharing it if they do so in every file.
    changes.update({name: changes[owner] for name, owner in tied.items() if owner in changes})
    result = Delta(base, dict(sorted(changes.items())), tied=tied)
    write(out, result)
    return describe(out, result)


def _merged(name: str, parts: list[tuple[TensorChange, float]]) -> TensorChange:
    """Return the weighted sum of the changes of one tensor."""
    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    shape, dtype = parts[0][0].shape, parts[0][0].values.dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    both = parts[0][0].values.new_zeros(2, math.prod(shape))
    moved = both.new_zeros(both.shape[1], dtype=wide)
    # 0 if no file changes an entry, 1 if its only change is used unchanged.
    count = both.new_zeros(both.shape[1], dtype=torch.int32)
    for change, weight in parts:
        indices, values = change.entries(), change.values.reshape(2, -1)
        moved[indices] += weight * (values[NEW].to(wide) - values[BASE].to(wide))
        bits(both[BASE])[indices] = bits(values[BASE])
        bits(both[NEW])[indices] = bits(values[NEW])
        count[indices] += 1 if weight == 1.0 else 2
    computed = count > 1
    mixed = both[BASE][computed].to(wide) + moved[computed]
    rounded = (mixed if dtype.is_floating_point or dtype.is_complex else mixed.round()).to(dtype)
    if not torch.isfinite(rounded.to(wide)).all():
        raise PolicyError(f"delta.merge: {shown(name)} would hold values that are not finite")
    bits(both[NEW])[computed] = bits(rounded)
    entries = count.nonzero().flatten()
    return of_entries(shape, entries, both[:, entries])
