"""Sources that freeze layers: their base class, Layerwise, BlockCyclic, Gradual."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from gradpolicy.checks import check_choice, check_integer
from gradpolicy.errors import PolicyError
from gradpolicy.masks.base import Layer, MaskSource
from gradpolicy.masks.layers import Groups, find_layers, join_layers, layers_of, names_in, read_groups
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.seeded import shuffled


class LayerSource(MaskSource, ABC):
    """Base class of sources that freeze and thaw layers.

    A subclass sets ``layer_groups`` in :meth:`prepare`, and defines :meth:`frozen_names`.

    Args:
        groups: The layers from the input to the output: a mapping of names to globs, or a list of groups of
            one or more globs; None: the result of :func:`find_layers`.
        **timetable: See :class:`~gradpolicy.masks.MaskSource`.

    Raises:
        PolicyError: If a group is empty.
    """

    repeats_masks, reads_weights = True, False

    def __init__(self, *, groups: Groups = None, **timetable: Any) -> None:
        super().__init__(**timetable)
        self.groups = read_groups(f"{type(self).__name__}.groups", groups)

    @abstractmethod
    def frozen_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of parameters in layers that do not train."""

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return one flag for each parameter."""
        frozen = self.frozen_names(step, epoch)
        return {name: name not in frozen for name in self.parameters}

    def find_groups(self, *, complete: bool = False) -> list[Layer]:
        """Return the layers of the argument ``groups``, or else those of the model; see :func:`layers_of`."""
        if self.groups is None:
            return find_layers(self.parameters, self.idle)
        return layers_of(f"{type(self).__name__}.groups", self.groups, self.parameters, complete=complete)

    def describe(self) -> dict[str, Any]:
        """Return the source's own arguments, including ``groups`` if it is not None."""
        return {**super().describe(), **({} if self.groups is None else {"groups": self.groups})}


class Layerwise(LayerSource):
    """Trains ``active`` layers, sampled without replacement every ``every`` steps; the others are frozen.

    Layers are the model's blocks (see :func:`~gradpolicy.masks.layers.find_layers`). Parameters outside of
    them, such as embeddings, the last norm and the head, always train. To let others always train too, leave
    them out of the policy's ``params``.

    Args:
        active: The number of layers that train at a time.
        every: The number of steps (or epochs) between samples.
        **timetable: ``groups``: the layers, instead of the model's blocks. ``unit``, ``start``, ``stop``,
            ``seed``: see :class:`~gradpolicy.masks.MaskSource`.

    Raises:
        PolicyError: If there are fewer layers than ``active``, or a glob matches nothing.

    Source: Pan et al. 2024, "LISA: Layerwise Importance Sampling", arXiv:2403.17919. As in their code, every
    layer is equally likely.

    Example:
        >>> import torch
        >>> source = Layerwise(active=1, every=20)
        >>> names = ["embed.weight", "h.0.weight", "h.1.weight", "h.2.weight", "head.weight"]
        >>> source.setup({name: torch.zeros(2, 2) for name in names}, seed=0)
        >>> masks = source.masks(step=0, epoch=0)
        >>> masks["embed.weight"], masks["head.weight"], sum(masks[f"h.{i}.weight"] for i in range(3))
        (True, True, 1)
    """

    def __init__(
        self,
        active: int = 2,
        *,
        every: int | None = 20,
        **timetable: Any,
    ) -> None:
        super().__init__(every=every, **timetable)
        self.active = check_integer("Layerwise.active", active, least=1)

    def prepare(self) -> None:
        """Find the layers."""
        found = [layer for layer in self.find_groups() if layer.numbered]
        if self.active > len(found):
            names = ", ".join(layer.name for layer in found)
            raise PolicyError(
                f"Layerwise.active: {self.active} layers wanted, but there are {len(found)}: {names}"
            )
        self.layer_groups = found

    def active_layers(self, step: int, epoch: int) -> list[str]:
        """Return the names of the active layers at a step, from the input to the output."""
        period = max(self.period(step, epoch), 0)
        chosen = sorted(shuffled(len(self.layer_groups), self.seed, period, "layerwise")[: self.active])
        return [self.layer_groups[index].name for index in chosen]

    def frozen_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of parameters in layers that were not sampled."""
        chosen = self.active_layers(step, epoch)
        return names_in(layer for layer in self.layer_groups if layer.name not in chosen)

    def may_freeze(self) -> set[str]:
        """Return the names of parameters that do not always train."""
        stack = self.layer_groups if self.active < len(self.layer_groups) else []
        return names_in(stack)


ORDERS = ("forward", "reverse", "random")


class BlockCyclic(LayerSource):
    """Trains one block of layers for ``every`` steps, then the next, in a cycle.

    A block is a layer (see :func:`~gradpolicy.masks.layers.find_layers`), or ``size`` neighbouring layers.
    Each parameter is in exactly one block: those before, between and after the model's blocks form further
    blocks. With ``frozen_state="zero"`` each block starts with empty optimizer state, as in BAdam.

    Args:
        order: ``"forward"`` (from the input to the output), ``"reverse"``, or ``"random"`` (a new permutation
            in each cycle).
        size: The number of neighbouring layers in a block.
        every: The number of steps (or epochs) for which a block trains; BAdam's ``K``.
        **timetable: ``groups``: the blocks, instead of layers; parameters in no group do not train.
            ``unit``, ``start``, ``stop``, ``seed``: see :class:`~gradpolicy.masks.MaskSource`.

    Raises:
        PolicyError: For an unknown order, or a glob that matches nothing.

    Source: Luo, Yu, Li 2024, "BAdam", arXiv:2404.02827.

    Example:
        >>> import torch
        >>> source = BlockCyclic(every=10, order="reverse")
        >>> source.setup({f"h.{i}.weight": torch.zeros(2) for i in range(3)}, seed=0)
        >>> [source.active_block(step, epoch=0).name for step in (0, 9, 10, 20, 30)]
        ['h.2', 'h.2', 'h.1', 'h.0', 'h.2']
    """

    def __init__(
        self,
        order: str = "forward",
        *,
        size: int = 1,
        every: int | None = 50,
        **timetable: Any,
    ) -> None:
        super().__init__(every=every, **timetable)
        self.order = check_choice("BlockCyclic.order", order, ORDERS)
        self.size = check_integer("BlockCyclic.size", size, least=1)
        if self.groups is not None and size != 1:
            raise PolicyError("BlockCyclic: size goes with layers, not with groups that are given")

    def prepare(self) -> None:
        """Find the blocks."""
        layers, size = self.find_groups(), self.size
        self.layer_groups = [join_layers(layers[i : i + size]) for i in range(0, len(layers), size)]

    def active_block(self, step: int, epoch: int) -> Layer:
        """Return the active block."""
        count = len(self.layer_groups)
        cycle, turn = divmod(max(self.period(step, epoch), 0), count)
        if self.order == "reverse":
            turn = count - 1 - turn
        elif self.order == "random":
            turn = shuffled(count, self.seed, cycle, "block_cyclic")[turn]
        return self.layer_groups[turn]

    def frozen_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of parameters outside the active block."""
        return self.parameters.keys() - self.active_block(step, epoch).parameters - set(self.idle)

    def may_freeze(self) -> set[str]:
        """Return the names of parameters that do not always train."""
        return set(self.parameters).difference(self.idle) if len(self.layer_groups) > 1 else set()


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
