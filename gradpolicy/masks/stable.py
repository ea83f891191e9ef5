"""Freezing of layers whose gradients no longer change (AutoFreeze)."""

from collections.abc import Mapping
from typing import Any

import torch

from gradpolicy.checks import check_share, check_whole
from gradpolicy.errors import PolicyError
from gradpolicy.masks.gradient_source import GradientSource
from gradpolicy.masks.layers import LayerSource, names_in
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.sharding import full_tensor


class Stable(GradientSource, LayerSource):
    """Freezes the layers before the first layer whose gradient still changes.

    The gradients are summed over intervals of ``every`` steps. With ``Gₗ`` the L1 norm of layer ``l``'s sum
    and ``Gₗ'`` that of the previous interval, the change of the layer is ``ηₗ = |Gₗ' − Gₗ| / Gₗ'``. The
    active layers before the first one with ``η`` at or above the ``percentile`` of all active layers are
    frozen permanently. Parameters before the first block (embeddings) freeze together with it; parameters
    after the last block never freeze.

    Args:
        percentile: From 0 (nothing freezes) to 100 (all layers before that with the largest change freeze).
        every: The interval in steps (or epochs).
        **timetable: ``groups``: the layers, instead of the model's; parameters in no group always train.
            ``unit``, ``start``, ``stop``, ``seed``: see :class:`MaskSource`. The first comparison is two
            intervals after ``start``.

    Raises:
        PolicyError: For a percentile outside [0, 100].

    Source: Liu, Agarwal, Venkataraman 2021, "AutoFreeze", arXiv:2102.01386.
    """

    def __init__(self, percentile: float = 50.0, *, every: int = 100, **timetable: Any) -> None:
        if "window" in timetable:
            raise PolicyError("Stable: takes no argument 'window'; it sums over all of an interval of every")
        super().__init__(window=None, every=check_whole("Stable.every", every, least=1), **timetable)
        self.percentile = check_share("Stable.percentile", percentile, whole=100)
        self.frozen = 0
        self.norms: list[float] = []
        self._front: set[str] = set()

    def prepare(self) -> None:
        """Find the layers, which are all active at first."""
        super().prepare()
        found = self.find_groups()
        first = next(place for place, layer in enumerate(found) if layer.numbered)
        self._front = names_in(found[:first])
        self.layer_groups = [layer for layer in found if layer.numbered]
        self.frozen, self.norms = 0, []

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return one flag for each parameter, after a comparison at the end of an interval."""
        period = self.period(step, epoch)
        if period == 0 and self.decided < 0:
            self.decide(step, epoch)  # the first interval starts
        elif period > 0 and self.overdue(step, epoch):
            self._compare()
            self.decide(step, epoch)
        return super().masks(step, epoch)

    def frozen_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of parameters in frozen layers."""
        return names_in(self.layer_groups[: self.frozen]) | (self._front if self.frozen else set())

    def wants_gradients(self, step: int, epoch: int) -> bool:
        """Return True from ``start`` to the last comparison."""
        count = self.count(step, epoch)
        return count >= self.timetable.start and self.timetable.next(count) is not None

    def gradient_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of parameters in active layers."""
        if not self.wants_gradients(step, epoch):
            return set()
        return names_in(self.layer_groups[self.frozen :])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of frozen layers and the norms for the next comparison."""
        return {**super().state_dict(), "frozen": self.frozen, "norms": list(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        super().load_state_dict(state)
        self.frozen, self.norms = state["frozen"], list(state["norms"])

    def may_freeze(self) -> set[str]:
        """Return the names of parameters in layers that may freeze."""
        return self._front | names_in(self.layer_groups[:-1])

    def _compare(self) -> None:
        """Compare the norms with those of the previous interval, and freeze layers."""
        sums = self.sums.get("gradient", {})
        norms = [
            sum(float(full_tensor(sums[name].abs().sum())) for name in layer.parameters if name in sums)
            for layer in self.layer_groups
        ]
        before, self.norms = self.norms, norms
        if before:
            self.frozen += settled_layers(before[self.frozen :], norms[self.frozen :], self.percentile)


def settled_layers(before: list[float], now: list[float], percentile: float) -> int:
    """Return the number of leading layers whose change is less than the percentile of all.

    ``η = |before − now| / before``. Layers without a gradient in either interval count as unchanged.
    """
    changes = torch.tensor(
        [
            abs(old - new) / old if old > 0.0 and new > 0.0 else 0.0
            for old, new in zip(before, now, strict=True)
        ],
        dtype=torch.float64,
        device="cpu",
    )
    threshold = torch.quantile(changes, percentile / 100.0)
    return int((changes >= threshold).nonzero()[0])
