"""Gradual unfreezing of layer groups, from the output to the input (ULMFiT)."""

from typing import Any

from gradpolicy.checks import check_integer
from gradpolicy.masks.layers import LayerSource, names_in


class Gradual(LayerSource):
    """Gradual unfreezing: the last layer group trains first, and each change adds the group before it.

    With the defaults the last ``initial + e`` groups train in epoch ``e``, until all groups train.

    Args:
        initial: The number of groups that train from the start.
        every: The number of epochs (or steps) after which another group is added.
        unit: ``"epoch"``, as in the paper, or ``"step"``.
        **timetable: ``groups``: the groups, instead of the layers; each parameter must be in one.
            ``start``, ``stop``, ``seed``: see :class:`~gradpolicy.masks.MaskSource`.

    Raises:
        PolicyError: If a glob matches nothing, or a parameter is in no group or in two.

    Source: Howard, Ruder 2018, "Universal Language Model Fine-tuning", arXiv:1801.06146, section 3.3.

    Example:
        >>> import torch
        >>> source = Gradual()
        >>> names = ["embed.weight", "layers.0.weight", "layers.1.weight", "head.weight"]
        >>> source.setup({name: torch.zeros(2) for name in names}, seed=0)
        >>> [sum(source.masks(step=0, epoch=epoch).values()) for epoch in range(5)]
        [1, 2, 3, 4, 4]
    """

    def __init__(
        self,
        initial: int = 1,
        *,
        every: int = 1,
        unit: str = "epoch",
        **timetable: Any,
    ) -> None:
        super().__init__(every=check_integer("Gradual.every", every, least=1), unit=unit, **timetable)
        self.initial = check_integer("Gradual.initial", initial, least=1)

    def prepare(self) -> None:
        """Find the groups."""
        self.layer_groups = self.find_groups(complete=True)

    def frozen_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of parameters in groups that do not train yet."""
        return names_in(self.layer_groups[: -self.initial - max(self.period(step, epoch), 0)])

    def may_freeze(self) -> set[str]:
        """Return the names of parameters that do not train from the start."""
        return names_in(self.layer_groups[: -self.initial])
