"""Only these rows: new tokens of an embedding, some heads, any part that an index names."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_whole
from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.base import StaticSource

Indices = int | str | slice | Tensor | Iterable[int | str | slice]


class Rows(StaticSource):
    """Only the given rows of each parameter train.

    Args:
        rows: What trains: a number (negative ones count from the end), a slice as Python writes it
            (``"50257:"``, ``"2:10:2"``), a list of either, a flag for each row, a tensor or numpy array of
            numbers or flags, or a whole index (``"3, 0, 5:"`` or ``"..., :2"``, or as a tuple with a slice in
            it); the dimensions that an index leaves out train in full.
        dim: The dimension that the rows are of (for an index with commas it has no meaning).
        size: How many neighbouring rows one number stands for: with ``size=head_width`` the numbers are
            attention heads.
        **timetable: ``every``, ``unit``, ``start``, ``stop``, ``seed``: see
            :class:`~gradpolicy.masks.base.MaskSource`. The masks never change, so that these make no
            difference, which a warning says.

    Raises:
        PolicyError: If an index cannot be read, or a row does not exist in a parameter.

    Example:
        >>> import torch
        >>> new_tokens = Rows("3:")
        >>> new_tokens.setup({"embed.weight": torch.zeros(5, 2)}, seed=0)
        >>> new_tokens.masks(0, 0)["embed.weight"].flatten().tolist()
        [False, False, False, True, True]
    """

    def __init__(self, rows: Indices, *, dim: int = 0, size: int = 1, **timetable: Any) -> None:
        super().__init__(**timetable)
        self.rows, self._index = _read(rows)
        self._flags: int | None = None
        if all(isinstance(part, bool) for part in self.rows):
            self._flags, self.rows = len(self.rows), [row for row, flag in enumerate(self.rows) if flag]
        if not self.rows:
            raise PolicyError("Rows: no row is given")
        self.size = check_whole("Rows.size", size, least=1)
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise PolicyError(f"Rows.dim: must be a whole number, got {shown(dim)}")
        self.dim = dim
        if self._index is not None and (dim != 0 or size != 1):
            raise PolicyError(f"Rows: an index ({shown(rows)}) goes with neither dim nor size")

    def prepare(self) -> None:
        """Marks the rows, and checks that every parameter has them."""
        make = self._by_rows if self._index is None else self._by_index
        self._masks = {name: make(name, parameter) for name, parameter in self.parameters.items()}

    def describe(self) -> dict[str, Any]:
        """The rows."""
        return {"rows": _shown(self.rows), "dim": self.dim, "size": self.size}

    def _by_rows(self, name: str, parameter: Tensor) -> Tensor:
        """``(n, 1, …)`` for rows of the first dimension, the full shape otherwise."""
        if not -parameter.dim() <= self.dim < parameter.dim():
            raise PolicyError(
                f"Rows.dim: {shown(name)} of shape {tuple(parameter.shape)} has no dimension {self.dim}"
            )
        dim = self.dim % parameter.dim()
        length = parameter.shape[dim]
        if length % self.size:
            raise PolicyError(
                f"Rows.size: the {length} rows of {shown(name)} cannot be cut into pieces of {self.size}"
            )
        if self._flags not in (None, length // self.size):
            raise PolicyError(
                f"Rows: {self._flags} flags for the {length // self.size} rows of {shown(name)}"
            )
        pieces = torch.zeros(length // self.size, dtype=torch.bool, device=parameter.device)
        pieces[_numbers(name, self.rows, len(pieces))] = True
        line = pieces.repeat_interleave(self.size)
        mask = line.reshape(tuple(length if place == dim else 1 for place in range(parameter.dim())))
        return mask if dim == 0 else mask.expand(parameter.shape).clone()

    def _by_index(self, name: str, parameter: Tensor) -> Tensor:
        mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
        try:
            mask[self._index] = True
        except (IndexError, ValueError) as error:
            shape = tuple(parameter.shape)
            raise PolicyError(
                f"Rows: {_shown(self.rows)} does not fit {shown(name)} of shape {shape}: {error}"
            ) from error
        if not mask.any():
            raise PolicyError(
                f"Rows: {_shown(self.rows)} leaves nothing of {shown(name)} of shape {tuple(parameter.shape)}"
            )
        return mask


def _read(rows: Indices) -> tuple[list[Any], tuple | None]:
    """The rows as a list of numbers and slices; or, where they are one, the index."""
    if isinstance(rows, str):
        parts = [_read_part(part) for part in rows.strip().removeprefix("[").removesuffix("]").split(",")]
        return (parts, tuple(parts)) if len(parts) > 1 or ... in parts else (parts, None)
    if isinstance(rows, tuple) and any(isinstance(part, slice) or part is ... for part in rows):
        return list(rows), rows
    if hasattr(rows, "tolist"):  # a tensor, a numpy array, or one of its numbers
        rows = rows.tolist()
    if isinstance(rows, int | slice):
        rows = [rows]
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise PolicyError(f"Rows: must be numbers, a slice or an index, got {shown(rows)}")
    return [_read_part(part) if isinstance(part, str) else part for part in rows], None


def _numbers(name: str, rows: list[Any], length: int) -> list[int]:
    """The rows as numbers from 0."""
    numbers: list[int] = []
    for part in rows:
        if isinstance(part, slice):
            within = list(range(length))[part]
            if not within:
                raise PolicyError(f"Rows: {_shown([part])} leaves none of the {length} rows of {shown(name)}")
            numbers += within
        elif isinstance(part, bool) or not isinstance(part, int) or not -length <= part < length:
            hint = '; an index is written as text: "2, 0, 3:"' if isinstance(part, Mapping) else ""
            raise PolicyError(f"Rows: {shown(name)} has no row {shown(part)}; it has {length}{hint}")
        else:
            numbers.append(part % length)
    return numbers


def _shown(rows: list[Any]) -> str:
    """Numbers and slices as Python writes them between brackets."""
    parts = [
        _written(part) if isinstance(part, slice) else "..." if part is ... else str(part) for part in rows
    ]
    return f"[{', '.join(parts)}]"


def _written(part: slice) -> str:
    """A slice as Python writes it between brackets."""
    bounds = (part.start, part.stop) if part.step is None else (part.start, part.stop, part.step)
    return ":".join("" if bound is None else str(bound) for bound in bounds)


def _read_part(text: str) -> Any:
    """A number, a slice or an ellipsis, as Python writes them between brackets."""
    text = text.strip()
    if text == "...":
        return ...
    try:
        if ":" not in text:
            return int(text)
        bounds = [int(part) if part.strip() else None for part in text.split(":")]
        if len(bounds) > 3 or bounds[2:] == [0]:
            raise ValueError(text)
        return slice(*bounds)
    except ValueError as error:
        raise PolicyError(f"Rows: {shown(text)} is no number, no slice and no '...'") from error
