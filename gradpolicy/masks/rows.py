"""Masks of rows, such as new tokens of an embedding or attention heads."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_integer
from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.base import StaticSource

Indices = int | str | slice | Tensor | Iterable[int | str | slice]


class Rows(StaticSource):
    """Trains only some rows of each parameter.

    Args:
        rows: The rows that train: a number (negative ones count from the end), a slice in Python's syntax
            (``"50257:"``, ``"2:10:2"``), a list of these, a flag for each row, a tensor or numpy array of
            numbers or flags, or an index of several dimensions (``"3, 0, 5:"`` or ``"..., :2"``, or a tuple
            that contains a slice).
        dim: The dimension of the rows. It cannot be combined with an index of several dimensions.
        size: The number of neighbouring rows that a number stands for: with ``size=head_width`` the numbers
            are attention heads.
        **timetable: ``every``, ``unit``, ``start``, ``stop``, ``seed``: see
            :class:`~gradpolicy.masks.base.MaskSource`. They have no effect, and give a warning.

    Raises:
        PolicyError: If an index is invalid, or a row does not exist in a parameter.

    Example:
        >>> import torch
        >>> new_tokens = Rows("3:")
        >>> new_tokens.setup({"embed.weight": torch.zeros(5, 2)}, seed=0)
        >>> new_tokens.masks(0, 0)["embed.weight"].flatten().tolist()
        [False, False, False, True, True]
    """

    def __init__(self, rows: Indices, *, dim: int = 0, size: int = 1, **timetable: Any) -> None:
        super().__init__(**timetable)
        self.rows = rows.tolist() if hasattr(rows, "tolist") else rows  # a tensor, or an array
        self._parts, self._is_index = _read(self.rows)
        self._flags: int | None = None
        if all(isinstance(part, bool) for part in self._parts):
            self._flags = len(self._parts)
            self._parts = [row for row, flag in enumerate(self._parts) if flag]
        if not self._parts:
            raise PolicyError("Rows: no row is given")
        for part in self._parts:
            if isinstance(part, bool) or (not isinstance(part, int | slice) and part is not ...):
                hint = '; an index is written as text: "2, 0, 3:"' if isinstance(part, Mapping) else ""
                raise PolicyError(f"Rows: {shown(part)} is no number, no slice and no '...'{hint}")
        self.size = check_integer("Rows.size", size, least=1)
        self.dim = check_integer("Rows.dim", dim)
        if self._is_index and (dim != 0 or size != 1):
            raise PolicyError(f"Rows: an index ({shown(rows)}) goes with neither dim nor size")

    def prepare(self) -> None:
        """Compute the masks, and check that all parameters have the rows."""
        for name, parameter in self.parameters.items():
            what = f"{shown(name)} of shape {tuple(parameter.shape)}"
            if self._is_index:
                mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
                self._mark(mask, [tuple(self._parts)], what)
            else:
                mask = self._by_rows(parameter, what)
            self._masks[name] = mask

    def _by_rows(self, parameter: Tensor, what: str) -> Tensor:
        """Return a mask that has size 1 in all other dimensions."""
        if not -parameter.dim() <= self.dim < parameter.dim():
            raise PolicyError(f"Rows.dim: {what} has no dimension {self.dim}")
        dim = self.dim % parameter.dim()
        count, rest = divmod(parameter.shape[dim], self.size)
        if rest:
            raise PolicyError(f"Rows.size: the rows of {what} cannot be cut into pieces of {self.size}")
        if self._flags not in (None, count):
            raise PolicyError(f"Rows: {self._flags} flags for the {count} rows of {what}")
        pieces = torch.zeros(count, dtype=torch.bool, device=parameter.device)
        self._mark(pieces, self._parts, what)
        line = pieces.repeat_interleave(self.size)
        return line.reshape(tuple(-1 if index == dim else 1 for index in range(parameter.dim())))

    def _mark(self, mask: Tensor, indices: list[Any], what: str) -> None:
        """Set the entries at each index to True.

        Raises:
            PolicyError: If an index does not exist.
        """
        for index in indices:
            try:
                empty = not mask[index].numel()
                mask[index] = True
            except (IndexError, ValueError) as error:
                raise PolicyError(f"Rows: {shown(self.rows)} does not fit {what}: {error}") from error
            if empty:
                raise PolicyError(f"Rows: {shown(self.rows)} leaves nothing of {what}")


def _read(rows: Any) -> tuple[list[Any], bool]:
    """Return the parts of the argument, and True if together they are an index of several dimensions."""
    if isinstance(rows, str):
        parts = [_read_part(part) for part in rows.strip().removeprefix("[").removesuffix("]").split(",")]
        return parts, len(parts) > 1 or ... in parts
    if isinstance(rows, int | slice):
        return [rows], False
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise PolicyError(f"Rows: expected numbers, a slice or an index, got {shown(rows)}")
    parts = [_read_part(part) if isinstance(part, str) else part for part in rows]
    return parts, isinstance(rows, tuple) and any(isinstance(part, slice) or part is ... for part in rows)


def _read_part(text: str) -> Any:
    """Parse a number, a slice or an ellipsis in Python's syntax; return other text unchanged."""
    numbers = [number.strip() for number in text.split(":")]
    if numbers == ["..."]:
        return ...
    try:
        bounds = [int(number) if number else None for number in numbers]
    except ValueError:
        return text
    if len(bounds) == 1:
        return text if bounds[0] is None else bounds[0]
    return text if len(bounds) > 3 or bounds[2:] == [0] else slice(*bounds)
