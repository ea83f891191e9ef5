"""Seeded random masks that change by a timetable."""

from collections.abc import Mapping
from typing import Any

from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.selection import Density, density_at, density_of_level
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.pattern import pattern_of
from gradpolicy.tensors.seeded import RandomMask, check_level


class Random(MaskSource):
    """Random masks with the probability ``density`` for each entry, row or tensor, every ``every`` steps.

    The masks are generated from (seed, step, name), so checkpoints contain no mask tensors. Child-Tuning_F
    also divides gradients by ``p``, to which Adam is invariant; with SGD give the parameters a learning rate
    of their own by :class:`~gradpolicy.Rates`.

    Args:
        density: The probability ``p``; a number or a schedule of the count.
        level: The unit of the masks: ``"entry"``, ``"row"``, ``"tensor"`` or blocks, ``"16x16"``; or
            ``"2:4"``: 2 of every 4 entries of a row.
        **timetable: ``every``, ``unit``, ``start``, ``stop``, ``seed``: see :class:`MaskSource`. Two random
            policies on one parameter need different seeds to be independent.

    Raises:
        PolicyError: For a density outside [0, 1] or an unknown level.

    Source: Child-Tuning_F, Xu et al. 2021, arXiv:2109.05687.

    Example:
        >>> import torch
        >>> source = Random(density=0.5, every=10)
        >>> source.setup({"fc.weight": torch.zeros(4, 4)}, seed=0)
        >>> source.masks(step=27, epoch=0)["fc.weight"]
        RandomMask(seed=0, step=20, name='fc.weight', density=0.5, level='entry')
    """

    repeats_masks, reads_weights = True, False

    def __init__(
        self,
        density: float | Density | None = None,
        *,
        level: str = "entry",
        **timetable: Any,
    ) -> None:
        super().__init__(**timetable)
        self.level = check_level("Random.level", level)
        self.density = density_of_level("Random", density, level)

    def prepare(self) -> None:
        """Check that the parameters are divisible by the level's pattern."""
        pattern = pattern_of(self.level)
        for name, parameter in self.parameters.items() if pattern else ():
            pattern.check(name, tuple(parameter.shape))  # type: ignore[union-attr]

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return a seeded mask for each parameter, which is constant until the next change."""
        drawn_at = self.timetable.begins(self.period(step, epoch))
        density = density_at(self.density, drawn_at)
        if density in (0.0, 1.0):
            return dict.fromkeys(self.parameters, density == 1.0)
        return {name: RandomMask(self.seed, drawn_at, name, density, self.level) for name in self.parameters}
