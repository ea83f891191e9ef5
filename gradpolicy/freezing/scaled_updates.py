"""Learning rates of single parameters: an update is scaled after the optimizer has made it."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.masks.base import MaskSource
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.tensors.sharding import local_shard

# Torch's optimizers whose update is not proportional to the learning rate.
_NOT_PROPORTIONAL = ("ASGD", "Adafactor", "LBFGS", "Rprop")


class ScaledUpdates:
    """Scales what an optimizer adds to some parameters, as another learning rate would scale it.

    ``w ← w₀ + r · (w − w₀)`` with ``w₀`` from before the update, which is what a learning rate ``r`` times as
    high gives where updates are proportional to it.

    Args:
        parameters: The parameters by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self._before: dict[str, Tensor] = {}
        self._rates: dict[str, float] = {}

    def begin(self, names: Iterable[str], rates: Mapping[str, float]) -> None:
        """Keep the weights whose coming update is to be scaled.

        Args:
            names: The parameters that are about to be updated.
            rates: What their learning rates are multiplied by; 1 where none is given.
        """
        if not rates and not self._before:
            return
        for name in names:
            parameter, rate = self.parameters[name], rates.get(name, 1.0)
            if parameter.grad is None or rate == 1.0:
                self._before.pop(name, None)
                self._rates.pop(name, None)
                continue
            # A step that asks for several backward passes, as SAM's does, moves the weights in between.
            if name not in self._rates:
                own = local_shard(parameter.detach())
                self._before.setdefault(name, torch.empty_like(own)).copy_(own)
            self._rates[name] = rate

    def finish(self, names: Iterable[str]) -> None:
        """Scale the updates since :meth:`begin`; one that was skipped has changed nothing."""
        for name in names:
            rate = self._rates.pop(name, None)
            if rate is None:
                continue
            own, before = local_shard(self.parameters[name].detach()), self._before[name]
            # What was frozen keeps its bits, an infinite value or a negative zero too.
            own.copy_(torch.where(own == before, before, torch.lerp(before, own, rate)))


def check_proportional(source: MaskSource, optimizers: Iterable[MaskedOptimizer]) -> None:
    """Check that the updates of optimizers are proportional to their learning rates.

    Raises:
        PolicyError: If one of the optimizers is of such a kind.
    """
    for name in sorted({type(each.inner).__name__ for each in optimizers}):
        if name in _NOT_PROPORTIONAL:
            raise PolicyError(
                f"{type(source).__name__} gives layers learning rates of their own, and {name}'s updates are "
                "not proportional to the rate; use another optimizer, such as SGD or AdamW"
            )
