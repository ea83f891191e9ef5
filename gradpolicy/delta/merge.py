"""Merging several delta files of one base."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from gradpolicy.delta.change import BASE, NEW, Change, bits, of_entries
from gradpolicy.delta.file import Delta, check_replaceable, read, write
from gradpolicy.delta.info import Info, describe
from gradpolicy.errors import PolicyError, shortened, shown
from gradpolicy.finite import all_finite


def merge(paths: Sequence[str | Path], weights: Sequence[float], out: str | Path) -> Info:
    """Writes a file with the changes of several, each with its weight.

    ``new = base + Σ_k weight_k · (new_k − base)``, in float64, then rounded to the tensor's dtype. An entry
    that one file alone changes, with weight 1, keeps its bits.

    Args:
        paths: Files with the same base.
        weights: A number for each.
        out: The file that is written; a delta that is there is replaced, and no other file.

    Returns:
        The content of the new file.

    Raises:
        PolicyError: If a file cannot be read or is damaged, the bases differ (the names of the tensors), a
            weight is no finite number, a value would not be finite, or `out` is something else than a delta.

    Source: task arithmetic; Ilharco et al. 2023, arXiv:2212.04089.
    """
    if isinstance(paths, str | Path) or not paths:
        raise PolicyError(f"delta.merge: paths must be a list of files, got {shown(paths)}")
    if len(weights) != len(paths):
        raise PolicyError(f"delta.merge: {len(paths)} files need as many weights, got {shown(list(weights))}")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise PolicyError(f"delta.merge: a weight must be a finite number, got {shown(weight)}")
    check_replaceable(out)
    deltas = [read(path) for path in paths]
    base = deltas[0].base
    for path, delta in zip(paths, deltas, strict=True):
        names = base.keys() | delta.base.keys()
        differing = sorted(name for name in names if base.get(name) != delta.base.get(name))
        if differing:
            raise PolicyError(
                f"delta.merge: {path} has another base than {paths[0]}: see {shortened(differing)}"
            )
    merged: dict[tuple[int, ...], Change] = {}
    changes = {}
    for name in sorted({name for delta in deltas for name in delta.changes}):
        parts = [
            (delta.changes[name], float(weight))
            for delta, weight in zip(deltas, weights, strict=True)
            if name in delta.changes
        ]
        # Names that share a tensor go on sharing it where they do so in every file.
        same = tuple(id(change) for change, _ in parts)
        if same not in merged:
            merged[same] = _merged(name, parts)
        changes[name] = merged[same]
    result = Delta(base, changes)
    write(out, result)
    return describe(out, result)


def _merged(name: str, parts: list[tuple[Change, float]]) -> Change:
    """Return the sum of the changes of one tensor, each with its weight."""
    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    first = parts[0][0]
    each = [change.entries() for change, _ in parts]
    total_size = math.prod(first.shape)
    entries = torch.arange(total_size) if total_size in map(len, each) else torch.cat(each).unique()
    dtype = first.values.dtype
    both = torch.zeros(2, len(entries), dtype=dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    moved = torch.zeros(len(entries), dtype=wide)
    # How many files change an entry, and whether its one change is to be taken as it is.
    count = torch.zeros(len(entries), dtype=torch.int32)
    exact = torch.zeros(len(entries), dtype=torch.bool)
    for (change, weight), own in zip(parts, each, strict=True):
        places = torch.searchsorted(entries, own)
        values = change.values.reshape(2, -1)
        moved[places] += weight * (values[NEW].to(wide) - values[BASE].to(wide))
        bits(both[BASE])[places] = bits(values[BASE])
        bits(both[NEW])[places] = bits(values[NEW])
        count[places] += 1
        exact[places] = weight == 1.0
    exact &= count == 1
    mixed = both[BASE].to(wide) + moved
    rounded = (mixed if dtype.is_floating_point or dtype.is_complex else mixed.round()).to(dtype)
    if not all_finite([rounded.to(wide)[~exact]]):
        raise PolicyError(f"delta.merge: {shown(name)} would hold values that are not finite")
    bits(both[NEW])[~exact] = bits(rounded)[~exact]
    return of_entries(first.shape, entries, both)
