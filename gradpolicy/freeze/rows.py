"""Only these rows: new tokens of an embedding, some heads, any part that an index names."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.freeze.mask import Mask
from gradpolicy.freeze.schedule import check_whole
from gradpolicy.freeze.source import MaskSource

Indices = int | str | slice | Iterable[int]


class Rows(MaskSource):
    """Only the given rows of each parameter train.

    Args:
        rows: What trains: numbers (negative ones count from the end), a slice as Python writes it
            (``"50257:"``, ``"2:10:2"``), or a whole index with commas (``"3, 0, 5:"`` or ``"..., :2"``); the
            dimensions that it leaves out train in full.
        dim: The dimension that the rows are of (for an index with commas it has no meaning).
        size: How many neighbouring rows one number stands for: with ``size=head_width`` the numbers are
            attention heads.
        seed: Taken for the sake of a common signature; nothing here is random.

    Raises:
        PolicyError: If an index cannot be read, or a row does not exist in a parameter.

    Example:
        >>> import torch
        >>> new_tokens = Rows("3:")
        >>> new_tokens.setup({"embed.weight": torch.zeros(5, 2)}, seed=0)
        >>> new_tokens.masks(0, 0)["embed.weight"].flatten().tolist()
        [False, False, False, True, True]
    """

    def __init__(self, rows: Indices, *, dim: int = 0, size: int = 1, seed: int | None = None) -> None:
        super().__init__(every=None, seed=seed)
        self.rows = rows if isinstance(rows, int | str | slice) else list(rows)
        self.size = check_whole("Rows.size", size, least=1)
        self.dim = dim
        self._index = _read_index(rows) if isinstance(rows, str) and "," in rows else None
        if self._index is not None and (dim != 0 or size != 1):
            raise PolicyError(f"Rows: an index with commas ({rows!r}) goes with neither dim nor size")
        self._masks: dict[str, Mask] = {}

    def prepare(self) -> None:
        """Marks the rows, and checks that every parameter has them."""
        make = self._by_rows if self._index is None else self._by_index
        self._masks = {name: make(name, parameter) for name, parameter in self.parameters.items()}

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """The masks, whatever the step."""
        return self._masks

    def describe(self) -> dict[str, Any]:
        """The rows."""
        return {"rows": self.rows, "dim": self.dim, "size": self.size}

    def _by_rows(self, name: str, parameter: Tensor) -> Tensor:
        """``(n, 1, …)`` for rows of the first dimension, the full shape otherwise."""
        if not -parameter.dim() <= self.dim < parameter.dim():
            raise PolicyError(
                f"Rows.dim: {name!r} of shape {tuple(parameter.shape)} has no dimension {self.dim}"
            )
        dim = self.dim % parameter.dim()
        length = parameter.shape[dim]
        if length % self.size:
            raise PolicyError(
                f"Rows.size: the {length} rows of {name!r} cannot be cut into pieces of {self.size}"
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
                f"Rows: {self.rows!r} does not fit {name!r} of shape {shape}: {error}"
            ) from error
        return mask


def _numbers(name: str, rows: "int | str | slice | list[int]", length: int) -> list[int]:
    """The rows as numbers from 0."""
    chosen = _read_part(rows) if isinstance(rows, str) else rows
    if isinstance(chosen, slice):
        numbers = list(range(length))[chosen]
        if not numbers:
            raise PolicyError(f"Rows: {rows!r} leaves none of the {length} rows of {name!r}")
        return numbers
    numbers = [chosen] if isinstance(chosen, int) else list(chosen)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not -length <= number < length:
            raise PolicyError(f"Rows: {name!r} has no row {number!r}; it has {length}")
    return [number % length for number in numbers]


def _read_index(text: str) -> tuple:
    return tuple(_read_part(part) for part in text.strip().removeprefix("[").removesuffix("]").split(","))


def _read_part(text: str) -> Any:
    """A number, a slice or an ellipsis, as Python writes them between brackets."""
    text = text.strip()
    if text == "...":
        return ...
    try:
        if ":" not in text:
            return int(text)
        bounds = [int(part) if part.strip() else None for part in text.split(":")]
        if len(bounds) > 3:
            raise ValueError(text)
        return slice(*bounds)
    except ValueError as error:
        raise PolicyError(f"Rows: {text!r} is no number, no slice and no '...'") from error
