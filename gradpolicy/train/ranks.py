"""Steps of freeze policies that several processes take together, in any training loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import keystr, tree_flatten_with_path

from gradpolicy.freezing import Freezer
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.tensors.sharding import is_sharded, local_shard
from gradpolicy.train.agreement import check_agreement
from gradpolicy.train.reducer import ReducerUpdater


@dataclass(eq=False)
class Ranks:
    """Prepares DDP's reducer for masks, and checks that the ranks agree.

    Before each effective step, after its masks are set, :meth:`begin_step` rebuilds the reducer if the set of
    active parameters has changed, and at some steps checks that all ranks have the same masks, ages and
    weights.

    Args:
        model: The model, wrapped in DistributedDataParallel if that is used.
        named: Its parameters by name.
        freezer: The freezer.
        optimizers: The masked optimizers.
        agreement_every: Effective steps between checks; None for no checks.

    Example:
        ::

            ranks = Ranks(ddp_model, dict(ddp_model.module.named_parameters()), freezer, [optimizer])
            for step, batch in enumerate(batches):
                freezer.begin_step(step)
                ranks.begin_step(step)
                ...
    """

    model: nn.Module | None
    named: Mapping[str, Tensor]
    freezer: Freezer
    optimizers: Sequence[MaskedOptimizer] = ()
    agreement_every: int | None = field(default=100, kw_only=True)
    reducer: ReducerUpdater | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.reducer = ReducerUpdater(self.model)

    def begin_step(self, step: int, *, cut: bool = False) -> None:
        """Prepare an effective step; every rank must call this with the same arguments.

        Args:
            step: Effective optimizer steps taken so far.
            cut: True if a policy cuts the graph in this step, so that parameters may get no gradient.

        Raises:
            PolicyError: If the ranks disagree.
        """
        if self.reducer is not None:
            self.reducer.refresh(find_unused_parameters=cut)
        is_due = self.agreement_every is not None and step % self.agreement_every == 0
        if is_due and dist.is_initialized() and dist.get_world_size() > 1:
            for group, compared in self.replicated().items():
                check_agreement(compared, group=group, moment=f"before update {step + 1}")

    def remove(self) -> None:
        """Leave the model to training without policies, which have been removed from it."""
        if self.reducer is not None:
            self.reducer.release()

    def replicated(self) -> dict[Any, dict[str, Any]]:
        """Return the values that must be equal within a process group, by name; None means all ranks.

        These are masks, ages, the count of updates, learning rates, the state of mask sources, and weights.
        Of a sharded parameter only its source's mask is the same everywhere. Under plain FSDP2 no two ranks
        have the same shard; under hybrid sharding several do.
        """
        found: dict[Any, dict[str, Any]] = {None: {}}

        def add(parameter: Tensor, name: str, value: Any) -> None:
            for group in _replica_groups(parameter):
                found.setdefault(group, {})[name] = value

        for name, parameter in self.named.items():
            for masked in (each.masked[parameter] for each in self.optimizers if parameter in each.masked):
                signed = masked.ages.signed()
                add(parameter, f"the mask of {name!r}", signed > 0)
                add(parameter, f"the ages of {name!r}", signed)
        for name in self.freezer.parameters:
            # Of a parameter that is distributed, a rank has no mask beside its source's.
            found[None].setdefault(f"the mask of {name!r}", self.freezer.mask_of(name))
        found[None] |= self._schedules()
        for name, parameter in self.named.items():
            add(parameter, f"the weights {name!r}", local_shard(parameter))
        return found

    def _schedules(self) -> dict[str, Any]:
        """Return the values that change during training and are not sharded."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        schedules: dict[str, Any] = {
            "the count of updates": [optimizer.effective_steps for optimizer in self.optimizers],
            "the learning rates": [float(group["lr"]) for group in groups if "lr" in group],
        }
        # If parameters are sharded, so is this state; the resulting masks are checked instead.
        if any(map(is_sharded, self.named.values())):
            return schedules
        for name, remembered in self.freezer.state_dict()["sources"].items():
            leaves, _ = tree_flatten_with_path(remembered)
            for path, value in leaves:
                schedules[f"what policy {name!r} remembers as {keystr(path)}"] = value
        return schedules


def _replica_groups(parameter: Tensor) -> list[Any]:
    """Return the process groups of ranks with the same shard of a parameter; None means all ranks."""
    if not is_sharded(parameter):
        return [None]
    sharded: Any = parameter
    return [
        sharded.device_mesh.get_group(dimension)
        for dimension, placement in enumerate(sharded.placements)
        if placement.is_replicate()
    ]


def is_first_copy(parameter: Tensor) -> bool:
    """Return True if this process is the first of those that hold the same entries."""
    return not dist.is_initialized() or all(dist.get_rank(each) == 0 for each in _replica_groups(parameter))


def is_first_rank() -> bool:
    """Return True in the process that prints and warns for all."""
    return not dist.is_initialized() or dist.get_rank() == 0
