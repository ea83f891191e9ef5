"""Training of a few sampled layers at a time (LISA)."""

from typing import Any

from gradpolicy.checks import check_integer
from gradpolicy.errors import PolicyError
from gradpolicy.masks.layers import LayerSource, names_in
from gradpolicy.tensors.seeded import shuffled


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
