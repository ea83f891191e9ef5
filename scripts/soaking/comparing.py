"""Compares the files of two runs: checkpoints bit for bit, logs, records and results."""

import csv
import io
import re
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradpolicy.insight.audit import Audit
from gradpolicy.insight.record import RECORD
from gradpolicy.insight.run_files import RESULT, Result

# The end of a run's directory in a path. The part before it differs between runs and is not compared.
RUN = re.compile(r".*/runs/[^/]+(?:/|$)")


def compare(first: Path, second: Path) -> list[str]:
    """Return descriptions of the differences of the newest runs below two folders."""
    one, other = (max((folder / "train/runs").iterdir()) for folder in (first, second))
    names = [sorted(path.name for path in run.glob("checkpoints/*")) for run in (one, other)]
    if names[0] != names[1]:
        return [f"checkpoints: {names[0]} became {names[1]}"]
    found = []
    for name in names[0]:
        before, after = (_content(run / "checkpoints" / name) for run in (one, other))
        found += differences(before, after, name)
    before, after = (Result.load(run / RESULT) for run in (one, other))
    found += differences(before.metrics, after.metrics, f"{RESULT}.metrics")
    found += differences(before.optimized, after.optimized, f"{RESULT}.optimized")
    for name, read in (("metrics.csv", _logged), (RECORD, _recorded)):
        rows = enumerate(zip_longest(read(one), read(other)), 1)
        found += [
            f"{name}, row {row}: {before} became {after}" for row, (before, after) in rows if before != after
        ]
    return found


def differences(first: Any, second: Any, place: str = "") -> list[str]:
    """Return the differences of two checkpoints, bit for bit, except for the directories of their runs."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        same = first.dtype == second.dtype and torch.equal(first, second)
        return [] if same else [f"{place}: {_shown(first)} became {_shown(second)}"]
    if isinstance(first, bytes) and isinstance(second, bytes):
        # A pickle tells a string that is one object at two places from two equal ones.
        first, second = (torch.load(io.BytesIO(each), weights_only=True) for each in (first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        first, second = ({_plain(key): value for key, value in each.items()} for each in (first, second))
        keys = list(dict.fromkeys([*first, *second]))
        missing = [f"{place}.{key}: only in one of them" for key in keys if (key in first) != (key in second)]
        both = [key for key in keys if key in first and key in second]
        return missing + [
            line for key in both for line in differences(first[key], second[key], f"{place}.{key}")
        ]
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{place}[{index}]")]
    return [] if _plain(first) == _plain(second) else [f"{place}: {first!r} became {second!r}"]


def _content(checkpoint: Path) -> Any:
    content = torch.load(checkpoint, weights_only=True)
    # A resumed run starts a new interval, and so counts other ones.
    content.pop(Audit.KEY, None)
    return content


def _plain(value: Any) -> Any:
    """Return a path relative to its run's directory; other values unchanged."""
    return RUN.sub("", value) if isinstance(value, str) else value


def _logged(run: Path) -> list[dict[str, str]]:
    with next(run.rglob("metrics.csv")).open(newline="") as file:
        return list(csv.DictReader(file))


def _recorded(run: Path) -> list[str]:
    return (run / RECORD).read_text().splitlines()


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} with sum {tensor.double().sum().item():.9g}"
