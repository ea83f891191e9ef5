"""Warnings of tensors that train without a gradient."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradpolicy.errors import shortened, warn_user
from gradpolicy.masks.base import Layer
from gradpolicy.tensors.sharding import is_sharded

MOST_UPDATES = 100
"""The number of updates without a gradient after which a tensor is reported."""
LEAST_UPDATES = 2
"""The same for a tensor that freezes. More than one, since a single forward pass may skip a branch."""

_NO_GRADIENT = (
    "no gradient gets there: no loss depends on it, a stop cuts it off, something else turned requires_grad "
    "off, or code was compiled while it was frozen"
)
_ONLY_ZEROS = (
    "only zeros get there: a rounding or another step before the loss passes no other gradient, unless a "
    "policy such as straight_through gives it one"
)


class MissingGradients:
    """Warns of trainable tensors that never get a gradient while they are active, or only zeros.

    A tensor is named once: after :data:`MOST_UPDATES` updates without a gradient, or when it freezes or
    training ends, if it had none before. Only tensors without a gradient so far are inspected, so that the
    cost per step is negligible.

    Args:
        trainable: The tensors that train unless they are frozen, by name, in model order.
        policies: The freeze policy of each tensor that has one.
        layers: The layers that each policy counts.
        reported: The names of tensors that were reported before.
    """

    def __init__(
        self,
        trainable: Mapping[str, Tensor],
        policies: Mapping[str, str],
        layers: Mapping[str, Sequence[Layer]],
        reported: Collection[str] = (),
    ) -> None:
        self._trainable, self._policies, self._layers = trainable, policies, layers
        # The number of updates without a gradient, for tensors that have had none so far.
        self._without: dict[str, int] = {}
        self._training: set[str] = set()
        self._reported = set(reported)
        # Tensors whose gradients had only zeros.
        self._zeros: set[str] = set()
        self._updates = 0

    def follow(self, frozen: Collection[str]) -> None:
        """Set the names of frozen tensors, and warn of those that had no gradient while they trained."""
        before, self._training = self._training, self._trainable.keys() - set(frozen)
        self._expect(self._training - before)
        self._warn(before - self._training, LEAST_UPDATES)

    def note(self, name: str, gradient: Tensor | None) -> None:
        """Record a gradient that is masked before :meth:`update`; None if a function returned none."""
        if name in self._without and gradient is not None and _trains_by(gradient):
            del self._without[name]
            self._zeros.discard(name)

    def update(self, optimized: Iterable[Tensor]) -> None:
        """Inspect the gradients of an optimizer's parameters, before they are masked."""
        waiting = self._without.keys() & self._training
        in_optimizer = set(optimized) if waiting else ()
        for name in waiting:
            parameter = self._trainable[name]
            if parameter in in_optimizer:
                self._without[name] += 1
                if parameter.grad is not None:
                    self._zeros.add(name)
                    self.note(name, parameter.grad)
        self._updates += 1
        if self._updates % MOST_UPDATES == 0:
            self._expect(self._training)
        self._warn(self._training, MOST_UPDATES)

    def finish(self) -> None:
        """Warn of active tensors that had no gradient when training ends."""
        self._warn(self._training, LEAST_UPDATES)
        self._without, self._training = {}, set()

    def _expect(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self._reported:
                self._without.setdefault(name, 0)

    def _warn(self, names: Collection[str], least: int) -> None:
        """Warn, for each policy and reason, of tensors without a gradient in this number of updates."""
        found = [name for name, count in self._without.items() if name in names and count >= least]
        alike: dict[tuple[str, str], list[str]] = {}
        for name in (name for name in self._trainable if name in found) if found else ():
            del self._without[name]
            why = _ONLY_ZEROS if name in self._zeros else _NO_GRADIENT
            alike.setdefault((self._policies.get(name, ""), why), []).append(name)
        self._reported.update(found)
        for (policy, why), idle in alike.items():
            listed = shortened(idle, most=8)
            lead = f"policy.{policy}: lets {listed} train" if policy else f"{listed} train"
            warn_user(f"{lead}, but {why}{''.join(self._counted(idle))}")

    def _counted(self, names: Collection[str]) -> Iterator[str]:
        """Yield a clause for each policy that counts layers of these tensors alone."""
        for policy, layers in self._layers.items():
            if idle := [layer.name for layer in layers if set(names).issuperset(layer.parameters)]:
                yield f"; policy.{policy} counts {shortened(idle)} as a layer: exclude it (!…)"


def _trains_by(gradient: Tensor) -> bool:
    """Return True for a gradient with an entry other than 0, and for all shards and sparse gradients."""
    if is_sharded(gradient) or gradient.layout != torch.strided or gradient.is_meta:
        return True
    return bool(gradient.any())
