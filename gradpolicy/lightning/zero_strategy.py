"""DistributedDataParallel with the optimizer's state sharded over the ranks (ZeRO stage 1)."""

import inspect
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer


class ZeroStrategy(DDPStrategy):
    """DDP in which each rank holds the optimizer state of only some parameters.

    The module's optimizers are replaced by ``ZeroRedundancyOptimizer``. Learning-rate schedulers keep
    working, since both share their parameter groups.

    Args:
        **settings: As for DDPStrategy.
    """

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Shard the state of each optimizer."""
        super().setup_optimizers(trainer)
        self.optimizers = [as_zero(optimizer) for optimizer in self.optimizers]


def as_zero(optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    """Shard the state of a new optimizer over the ranks.

    Args:
        optimizer: An optimizer that has not stepped.

    Returns:
        A ZeroRedundancyOptimizer that shares the parameter groups of the given one, so that a learning-rate
        scheduler acts on both.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer
    accepted = inspect.signature(type(optimizer).__init__).parameters
    defaults: dict[str, Any] = {key: optimizer.defaults[key] for key in optimizer.defaults if key in accepted}
    shared = ZeroRedundancyOptimizer(
        [dict(group) for group in optimizer.param_groups], type(optimizer), **defaults
    )
    shared.param_groups = optimizer.param_groups

    def share_groups(loaded: Optimizer) -> None:
        """Share the new groups after a state was loaded."""
        optimizer.param_groups = loaded.param_groups

    shared.register_load_state_dict_post_hook(share_groups)
    # A scheduler checks that the optimizer that it was created with has stepped; the sharded one steps
    # instead.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return shared
