"""Seeded masks: a few numbers in place of a tensor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_choice
from gradpolicy.errors import PolicyError, shown
from gradpolicy.tensors.hashing import bernoulli, derive

LEVELS = ("entry", "row", "tensor")


@dataclass(frozen=True)
class RandomMask:
    """A random mask that is drawn when it is needed, so that no checkpoint has to hold it.

    Each entry, row or tensor is active with the chance ``density``, independently; the bits depend on
    (seed, step, name, index) only and are the same on every device.

    Attributes:
        seed: The run's seed, or the mask source's own.
        step: The effective step (or epoch) at which the mask was drawn.
        name: The parameter's name.
        density: The chance of being active, from 0 to 1.
        level: What is drawn together: ``"entry"``, ``"row"`` (an index of the first dimension) or
            ``"tensor"``.

    Example:
        >>> mask = RandomMask(seed=0, step=40, name="fc.weight", density=0.5)
        >>> whole = mask.materialize((8, 4))
        >>> bool((mask.materialize((8, 4), start=2, stop=5) == whole[2:5]).all())
        True
    """

    seed: int
    step: int
    name: str
    density: float
    level: str = "entry"

    def __post_init__(self) -> None:
        check_choice("RandomMask.level", self.level, LEVELS)
        if not 0.0 <= self.density <= 1.0:
            raise PolicyError(f"RandomMask.density: must lie between 0 and 1, got {shown(self.density)}")

    def materialize(
        self,
        shape: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Return the mask.

        Args:
            shape: The whole parameter's shape.
            device: The device of the mask.
            start: First index of dimension 0 that is wanted.
            stop: The index after the last; None means all.

        Returns:
            A bool tensor: for ``"entry"`` of the shape ``(stop - start, *shape[1:])``, for ``"row"``
            ``(stop - start, 1, …)``, for ``"tensor"`` ``(1, 1, …)``.
        """
        shape = tuple(shape)
        key = derive(self.seed, self.step, self.name)
        if self.level == "tensor" or not shape:
            return bernoulli(key, self.density, 0, 1, device).reshape((1,) * len(shape))
        begin, end, _ = slice(start, stop).indices(shape[0])
        width = math.prod(shape[1:]) if self.level == "entry" else 1
        drawn = bernoulli(key, self.density, begin * width, end * width, device)
        inner = shape[1:] if self.level == "entry" else (1,) * (len(shape) - 1)
        return drawn.reshape(max(end - begin, 0), *inner)

    def state(self) -> dict[str, Any]:
        """Return the numbers as a plain dict, which a checkpoint holds under ``weights_only=True``."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "RandomMask":
        """Return the mask of a state of :meth:`state`.

        Raises:
            PolicyError: If an entry is missing or not known.
        """
        try:
            return cls(**state)
        except TypeError as error:
            raise PolicyError(f"seeded mask {shown(dict(state))}: {error}") from error
