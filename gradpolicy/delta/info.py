"""The content of a delta file as a table."""

import math
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from gradpolicy.delta.file import Delta, read
from gradpolicy.delta.state import DTYPES, print_of
from gradpolicy.display import Displayed, text_table


@dataclass(frozen=True)
class TensorInfo:
    """The change of one tensor in a file.

    Args:
        name: Its name in the state_dict.
        dtype: Its dtype, such as ``"float32"``.
        shape: Its shape.
        form: ``"entries"``, ``"rows"`` or ``"whole"``; ``"replaced"`` if the base's values do not matter;
            ``"tied"`` if it is the tensor of another name, which counts there.
        stored: The number of entries with a value in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    form: str
    stored: int


@dataclass(frozen=True)
class Info(Displayed):
    """The content of a file, which prints as a table.

    Args:
        path: The file.
        bytes: Its size.
        base: The fingerprint of the base, 16 hexadecimal digits.
        base_bytes: Bytes of the model's tensors.
        entries: Number of entries of the model.
        tensors: The tensors that changed, by name; replaced ones last.
    """

    path: Path
    bytes: int
    base: str
    base_bytes: int
    entries: int
    tensors: tuple[TensorInfo, ...]

    @property
    def stored(self) -> int:
        """The number of entries with a value in the file."""
        return sum(tensor.stored for tensor in self.tensors)

    def __rich__(self) -> Table:
        """Return a table with a row for each tensor."""
        title = (
            f"{self.path.name}: {self.stored:,} of {self.entries:,} entries, {self.bytes:,} bytes "
            f"({self.bytes / max(self.base_bytes, 1):.2%} of the model's), base {self.base}"
        )
        rows = (
            (each.name, each.dtype, "×".join(map(str, each.shape)) or "scalar", each.form, f"{each.stored:,}")
            for each in self.tensors
        )
        headings = ("tensor", "dtype", "shape", "stored as", "entries")
        return text_table(title, headings, rows, right=("entries",))


def info(path: str | Path) -> Info:
    """Return a summary of a file.

    Args:
        path: A file of :func:`gradpolicy.delta.save` or :func:`gradpolicy.delta.merge`.

    Raises:
        PolicyError: If it cannot be read or is damaged.
    """
    return describe(path, read(path))


def describe(path: str | Path, delta: Delta) -> Info:
    """Return a summary of a file's content."""
    tensors = []
    for name, change in delta.changes.items():
        form, stored = ("tied", 0) if name in delta.tied else (change.form, change.stored)
        tensors.append(TensorInfo(name, delta.base[name].dtype, change.shape, form, stored))
    counted = [each for name, each in delta.base.items() if name not in delta.tied]
    for name, new in delta.replaced.items():
        counted.append(print_of(new))
        tensors.append(TensorInfo(name, counted[-1].dtype, counted[-1].shape, "replaced", new.numel()))
    return Info(
        path=Path(path),
        bytes=Path(path).stat().st_size,
        base=delta.fingerprint,
        base_bytes=sum(math.prod(each.shape) * DTYPES[each.dtype].itemsize for each in counted),
        entries=sum(math.prod(each.shape) for each in counted),
        tensors=tuple(tensors),
    )
