"""Finds tensors that train and get no gradient, or only zeros."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

MOST_UPDATES = 100
"""Updates after which a tensor without a gradient is named, where it does not freeze before."""
LEAST_UPDATES = 2
"""Updates that are enough where it does: in one, a branch of the model may just not have been taken."""


class MissingGradients:
    """Finds tensors that should train and never get a gradient, or only zeros.

    A tensor is reported when it freezes or training ends, if it got none in the updates before; and after
    :data:`MOST_UPDATES` updates without one. Only tensors without a gradient so far are inspected, so that a
    step costs next to nothing.

    Attributes:
        zeros: Tensors that got a gradient, but zeros alone.

    Example:
        >>> import torch
        >>> used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> parameters, missing = {"used": used, "unused": unused}, MissingGradients()
        >>> used.sum().backward()
        >>> for _ in range(3):
        ...     found = [*missing.follow(parameters), *missing.update(parameters)]
        >>> found, missing.finish()
        ([], ['unused'])
    """

    def __init__(self) -> None:
        # How many updates each has had without a gradient. Those that got one are not here.
        self._without: dict[str, int] = {}
        self._training: set[str] = set()
        self._named: set[str] = set()
        self.zeros: set[str] = set()
        self._updates = 0

    def follow(self, training: Collection[str]) -> list[str]:
        """Take the names of the tensors that train from now on.

        Returns:
            The names of those that no longer do, and got no gradient while they did.
        """
        before, self._training = self._training, set(training)
        self._expect(self._training - before)
        return self._found(before - self._training, LEAST_UPDATES)

    def note(self, name: str, gradient: Tensor) -> None:
        """Take a gradient that is masked before :meth:`update` sees it."""
        if name in self._without and _trains_by(gradient):
            del self._without[name]
            self.zeros.discard(name)

    def update(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Inspect the gradients of some parameters, before those of frozen entries are removed.

        Returns:
            The names of those that got none in :data:`MOST_UPDATES` updates.
        """
        for name in [*self._without]:
            parameter = parameters.get(name)
            if parameter is None or name not in self._training:
                continue
            if _trains_by(parameter.grad):
                del self._without[name]
                self.zeros.discard(name)
                continue
            self._without[name] += 1
            if parameter.grad is not None:
                self.zeros.add(name)
        self._updates += 1
        if self._updates % MOST_UPDATES == 0:
            self._expect(self._training)
        return self._found(self._training, MOST_UPDATES)

    def finish(self) -> list[str]:
        """Return the names of those that got no gradient up to the end of training."""
        found = self._found(self._training, LEAST_UPDATES)
        self._without, self._training = {}, set()
        return found

    def _expect(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self._named:
                self._without.setdefault(name, 0)

    def _found(self, names: Collection[str], least: int) -> list[str]:
        """Return the names of those without a gradient in so many updates, each once."""
        found = [name for name, count in self._without.items() if name in names and count >= least]
        for name in found:
            del self._without[name]
        self._named.update(found)
        return found


def _trains_by(gradient: Tensor | None) -> bool:
    """Return True for a gradient with an entry other than 0; of shards and sparse gradients, for any."""
    if gradient is None:
        return False
    if isinstance(gradient, DTensor) or gradient.layout != torch.strided or gradient.is_meta:
        return True
    return bool(gradient.any())
