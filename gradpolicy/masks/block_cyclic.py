"""Block-cyclic training of layers (BAdam)."""

from typing import Any

from gradpolicy.checks import check_choice, check_integer
from gradpolicy.errors import PolicyError
from gradpolicy.masks.base import Layer
from gradpolicy.masks.layers import LayerSource, join_layers
from gradpolicy.tensors.seeded import shuffled

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
        return self.parameters.keys() - self.active_block(step, epoch).parameters

    def may_freeze(self) -> set[str]:
        """Return the names of parameters that do not always train."""
        return set(self.parameters) if len(self.layer_groups) > 1 else set()
