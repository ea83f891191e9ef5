"""Warnings of active tensors without a gradient."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from gradpolicy.errors import shortened, warn_user
from gradpolicy.freezing.bound_policy import BoundPolicy
from gradpolicy.tensors.sharding import is_sharded

MOST_UPDATES = 100
"""The number of updates without a gradient after which a tensor is reported."""
LEAST_UPDATES = 2
"""The same for a tensor that freezes. More than one, since a single forward pass may skip a branch."""

_NO_GRADIENT = (
    "no gradient gets there: no loss depends on it, something else turned requires_grad off, or code was "
    "compiled while it was frozen"
)
_ONLY_ZEROS = (
    "only zeros get there: a rounding or another step before the loss passes no other gradient, unless a "
    "policy such as straight_through gives it one"
)


class MissingGradients:
    """Finds active tensors that never get a gradient, or only zeros.

    A tensor is reported after :data:`MOST_UPDATES` updates without a gradient, or when it freezes or training
    ends, if it had none before. Only tensors without a gradient so far are inspected, so that the cost per
    step is negligible.

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
        # The number of updates without a gradient, for tensors that have had none so far.
        self._without: dict[str, int] = {}
        self._training: set[str] = set()
        self._reported: set[str] = set()
        # Tensors whose gradients had only zeros.
        self._zeros: set[str] = set()
        self._updates = 0

    def follow(self, training: Collection[str]) -> list[str]:
        """Set the names of the active tensors.

        Returns:
            The names of tensors that are no longer active, and had no gradient while they were.
        """
        before, self._training = self._training, set(training)
        self._expect(self._training - before)
        return self._found(before - self._training, LEAST_UPDATES)

    def note(self, name: str, gradient: Tensor) -> None:
        """Record a gradient that is masked before :meth:`update`."""
        if name in self._without and _trains_by(gradient):
            del self._without[name]
            self._zeros.discard(name)

    def update(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Inspect the gradients of parameters, before they are masked.

        Returns:
            The names of parameters that had no gradient in :data:`MOST_UPDATES` updates.
        """
        for name in self._without.keys() & self._training & parameters.keys():
            gradient = parameters[name].grad
            self._without[name] += 1
            if gradient is not None:
                self._zeros.add(name)
                self.note(name, gradient)
        self._updates += 1
        if self._updates % MOST_UPDATES == 0:
            self._expect(self._training)
        return self._found(self._training, MOST_UPDATES)

    def finish(self) -> list[str]:
        """Return the names of active tensors without a gradient at the end of training."""
        found = self._found(self._training, LEAST_UPDATES)
        self._without, self._training = {}, set()
        return found

    def warn(self, names: Collection[str], policies_of: Mapping[str, Sequence[BoundPolicy]]) -> None:
        """Give a warning for each policy and reason.

        Args:
            names: The names of tensors without a gradient.
            policies_of: The policies of each tensor, in the order of the model.
        """
        alike: dict[tuple[str, str], list[str]] = {}
        for name, policies in policies_of.items() if names else ():
            if name in names:
                why = _ONLY_ZEROS if name in self._zeros else _NO_GRADIENT
                alike.setdefault((policies[0].name, why), []).append(name)
        for (policy, why), own in alike.items():
            warn_user(f"policy.{policy}: lets {shortened(own, most=8)} train, but {why}")

    def _expect(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self._reported:
                self._without.setdefault(name, 0)

    def _found(self, names: Collection[str], least: int) -> list[str]:
        """Return tensors without a gradient in at least this number of updates. Each is returned once."""
        found = [name for name, count in self._without.items() if name in names and count >= least]
        for name in found:
            del self._without[name]
        self._reported.update(found)
        return found


def _trains_by(gradient: Tensor) -> bool:
    """Return True for a gradient with an entry other than 0, and for all shards and sparse gradients."""
    if is_sharded(gradient) or gradient.layout != torch.strided or gradient.is_meta:
        return True
    return bool(gradient.any())
