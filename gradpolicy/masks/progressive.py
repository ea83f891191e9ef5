"""Progressive freezing of layers with annealed learning rates (FreezeOut)."""

import math
from collections.abc import Mapping
from typing import Any

from gradpolicy.checks import check_choice, check_flag, check_share, check_whole
from gradpolicy.errors import PolicyError
from gradpolicy.masks.base import Layer
from gradpolicy.masks.layers import LayerSource

POWERS = {"linear": 1, "squared": 2, "cubic": 3}


class Progressive(LayerSource):
    """Trains layer ``i`` of ``L`` up to the fraction ``tᵢ`` of the training, then freezes it.

    ``tᵢ = (first + (1 − first) · i / (L − 1)) ^ p`` with ``p`` = 1 for ``"linear"``, 3 for ``"cubic"``: the
    first layer freezes first, the last trains to the end. Until then its learning rate is annealed to 0:

    ``αᵢ(t) = ½ · αᵢ(0) · (1 + cos(π t / tᵢ))``, ``αᵢ(0) = α / tᵢ`` with ``scale``, else ``α``,

    where ``α`` is the optimizer's learning rate in that step and ``t`` the fraction of the training so far.
    In the paper ``α`` is constant; the factor of an LR scheduler, such as a warm-up, is multiplied with the
    annealing. With ``1 / tᵢ`` the sum of the learning rates is the same for all layers. Parameters after the
    last block belong to the last layer.

    Args:
        total: The length of the training in steps (or epochs).
        first: The fraction at which the first layer freezes with ``"linear"``: ``t₀`` before the power.
        curve: ``"linear"``, ``"squared"`` or ``"cubic"``.
        anneal: Anneal the learning rates as above; otherwise only freeze.
        scale: Start with ``α / tᵢ``; only with ``anneal``.
        every: The number of steps (or epochs) between changes of masks and learning rates.
        **timetable: ``groups``: the layers, instead of the model's; parameters in no group always train.
            ``unit``, ``start``, ``stop``, ``seed``: see :class:`~gradpolicy.masks.MaskSource`. ``total`` is
            counted from ``start``.

    Raises:
        PolicyError: For an unknown curve or a fraction of 0; with ``anneal``, when training starts, for LBFGS
            and Rprop, which do not support learning rates of single parameters.

    Source: Brock, Lim, Ritchie, Weston 2017, "FreezeOut", arXiv:1706.04983.

    Example:
        >>> import torch
        >>> source = Progressive(total=100, first=0.5, curve="linear")
        >>> source.setup({f"layers.{i}.weight": torch.zeros(2) for i in range(3)}, seed=0)
        >>> source.shares
        {'layers.0': 0.5, 'layers.1': 0.75, 'layers.2': 1.0}
        >>> list(source.masks(step=60, epoch=0).values())
        [False, True, True]
    """

    def __init__(
        self,
        total: int,
        *,
        first: float = 0.8,
        curve: str = "cubic",
        anneal: bool = True,
        scale: bool = True,
        every: int = 1,
        **timetable: Any,
    ) -> None:
        super().__init__(every=check_whole("Progressive.every", every, least=1), **timetable)
        self.total = check_whole("Progressive.total", total, least=1)
        self.first = check_share("Progressive.first", first)
        if self.first == 0.0:
            raise PolicyError("Progressive.first: must be above 0, or the first layer would never train")
        self.curve = check_choice("Progressive.curve", curve, POWERS)
        self.anneal = check_flag("Progressive.anneal", anneal)
        self.scale = check_flag("Progressive.scale", scale)
        self.shares: dict[str, float] = {}
        self._share_of: dict[str, float] = {}

    def prepare(self) -> None:
        """Compute the fraction of the training for each layer."""
        layers = self.layer_groups = _with_what_follows(self.find_groups())
        last = max(len(layers) - 1, 1)
        self.shares, self._share_of = {}, {}
        for place, layer in enumerate(layers):
            position = 1.0 if len(layers) == 1 else place / last
            share = (self.first + (1.0 - self.first) * position) ** POWERS[self.curve]
            self.shares[layer.name] = share
            self._share_of.update(dict.fromkeys(layer.parameters, share))

    def frozen_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of parameters in layers that are frozen."""
        passed = self._passed(step, epoch)
        return {name for name, share in self._share_of.items() if passed >= share}

    def learning_rate_scale(self, step: int, epoch: int) -> Mapping[str, float]:
        """Return ``αᵢ(t) / α`` for each active parameter."""
        if not self.anneal:
            return {}
        passed = self._passed(step, epoch)
        return {
            name: 0.5 * (1.0 + math.cos(math.pi * passed / share)) / (share if self.scale else 1.0)
            for name, share in self._share_of.items()
            if passed < share
        }

    def _passed(self, step: int, epoch: int) -> float:
        """Return the fraction of the training at the last change."""
        return (self.timetable.begins(self.period(step, epoch)) - self.timetable.start) / self.total

    def may_freeze(self) -> set[str]:
        """Return the names of parameters that freeze before the end."""
        return {name for name, share in self._share_of.items() if share < 1.0}


def _with_what_follows(layers: list[Layer]) -> list[Layer]:
    """Join the layers after the last block to it."""
    end = max(place for place, layer in enumerate(layers) if layer.numbered)
    tail = tuple(name for layer in layers[end:] for name in layer.parameters)
    return [*layers[:end], Layer(layers[end].name, tail, True)]
