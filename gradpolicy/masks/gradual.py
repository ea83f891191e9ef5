"""ULMFiT: unfreezes one layer group after the other, from the output to the input."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from gradpolicy.checks import check_whole
from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.layers import Layer, find_layers, layers_of, read_groups
from gradpolicy.tensors.mask import Mask


class Gradual(MaskSource):
    """Gradual unfreezing: at first the last layer group trains, then one more from the top at each change.

    In epoch ``e`` the last ``initial + e`` groups train (with the defaults), until all do.

    Args:
        initial: How many groups train from the beginning.
        groups: The groups from the input to the output, each as globs; None: the model's layers.
        every: After how many epochs (or steps) one more group trains.
        unit: ``"epoch"``, as in the paper, or ``"step"``.
        **timetable: ``start``, ``stop``, ``seed``: see :class:`MaskSource`.

    Raises:
        PolicyError: If a glob matches nothing, a parameter is in no group or in two.

    Source: Howard, Ruder 2018, "Universal Language Model Fine-tuning", arXiv:1801.06146, section 3.3.

    Example:
        >>> import torch
        >>> source = Gradual()
        >>> names = ["embed.weight", "layers.0.weight", "layers.1.weight", "head.weight"]
        >>> source.setup({name: torch.zeros(2) for name in names}, seed=0)
        >>> [sum(source.masks(step=0, epoch=epoch).values()) for epoch in range(5)]
        [1, 2, 3, 4, 4]
    """

    repeats_masks = True

    def __init__(
        self,
        initial: int = 1,
        *,
        groups: Iterable[str | Iterable[str]] | None = None,
        every: int = 1,
        unit: str = "epoch",
        **timetable: Any,
    ) -> None:
        super().__init__(every=check_whole("Gradual.every", every, least=1), unit=unit, **timetable)
        self.initial = check_whole("Gradual.initial", initial, least=1)
        self.given = None if groups is None else read_groups("Gradual.groups", groups)
        self.groups: list[Layer] = []

    def prepare(self) -> None:
        """Finds the groups."""
        if self.given is None:
            self.groups = find_layers(self.parameters)
            return
        self.groups = layers_of(self.given, self.parameters)
        members = Counter(name for group in self.groups for name in group.parameters)
        for name in self.parameters:
            if members[name] != 1:
                raise PolicyError(f"Gradual.groups: {shown(name)} must be in one group, not {members[name]}")

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """True for the groups that train already."""
        count = self.initial + max(self.period(step, epoch), 0)
        thawed = {name for group in self.groups[-count:] for name in group.parameters}
        return {name: name in thawed for name in self.parameters}

    def layer_groups(self) -> list[Layer]:
        """The groups that thaw one after the other, the last one first."""
        return self.groups

    def may_freeze(self) -> set[str]:
        """The parameters of the layers that do not always train."""
        return {name for group in self.groups[: -self.initial] for name in group.parameters}

    def describe(self) -> dict[str, Any]:
        """How many groups train from the beginning, and which there are where that was given."""
        return {"initial": self.initial, **({} if self.given is None else {"groups": self.given})}
