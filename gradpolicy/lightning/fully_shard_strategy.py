"""FSDP2 for a LightningModule that does not shard itself."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from gradpolicy.distributed import sharded_checkpoint
from gradpolicy.distributed.shard_reader import load_into
from gradpolicy.lightning.checkpoints import VERSION, load_checkpoint, read_checkpoint
from gradpolicy.where import as_patterns, match_modules

STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


class FullyShardStrategy(ModelParallelStrategy):
    """Shards parameters, gradients and optimizer state over all ranks (FSDP2).

    Lightning's ModelParallelStrategy needs a module with a ``configure_model`` that shards it. If there is
    none, this strategy shards the module: the parameters of each submodule that ``modules`` matches are
    gathered and freed together, and all others with the root.

    Checkpoints are directories, which are complete or do not exist. This strategy loads those of any number
    of ranks, and files of other strategies. Other strategies load the directories through
    :class:`~gradpolicy.lightning.checkpoints.WholeCheckpointIO`.

    Args:
        modules: Globs or classes of the modules to shard one by one, such as ``"model.layers.*"``; None: the
            members of every ``nn.ModuleList`` and ``nn.Sequential`` that hold parameters.
        reshard_after_forward: Free the gathered parameters after the forward pass and gather them again for
            the backward pass: less memory, 50 % more traffic.
        **settings: As for ModelParallelStrategy, such as ``save_distributed_checkpoint``.

    Raises:
        PolicyError: If a pattern matches nothing.
    """

    def __init__(
        self,
        modules: str | Iterable[str] | None = None,
        *,
        reshard_after_forward: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(tensor_parallel_size=settings.pop("tensor_parallel_size", 1), **settings)
        self.modules = as_patterns(modules)
        self.reshard_after_forward = reshard_after_forward

    def setup_environment(self) -> None:
        """Use all ranks for the data-parallel dimension."""
        if self._data_parallel_size == "auto":
            ranks = self.num_nodes * self.num_processes
            self._data_parallel_size = ranks // int(self._tensor_parallel_size)
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Shard the module unless it shards itself."""
        module = self.lightning_module
        assert module is not None
        if is_overridden("configure_model", module):
            super().setup(trainer)
            return
        shard_modules(
            module,
            self.device_mesh["data_parallel"],
            self.modules,
            reshard_after_forward=self.reshard_after_forward,
        )
        # Lightning requires this hook, although the module is already sharded.
        module.configure_model = _already_sharded  # type: ignore[method-assign]
        try:
            super().setup(trainer)
        finally:
            del module.configure_model

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save the shards of every rank into a directory, which is complete or does not exist.

        Raises:
            OSError: On every rank, if any of them could not write.
        """
        if not self._save_distributed_checkpoint or "://" in str(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        states = checkpoint.pop("optimizer_states", [])
        sharded = {
            "state_dict": checkpoint.pop("state_dict"),
            **{f"optimizer_{number}": state for number, state in enumerate(states)},
        }
        sharded_checkpoint.save_whole(sharded, checkpoint, Path(self.broadcast(filepath)))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a directory of any number of ranks, or the file of a strategy that does not shard.

        Args:
            checkpoint_path: The checkpoint; the path of the first rank is used.
            weights_only: Ignored: only tensors and plain values are ever read.

        Raises:
            PolicyError: If it is damaged, has NaN weights, or contains code.
        """
        path = Path(self.broadcast(checkpoint_path))
        module = self.lightning_module
        assert module is not None
        if not path.is_file():
            return self._load_directory(path, strict=module.strict_loading)
        checkpoint = load_checkpoint(path, mmap=True)
        options = StateDictOptions(full_state_dict=True, strict=module.strict_loading)
        set_model_state_dict(module, checkpoint.pop("state_dict"), options=options)
        for optimizer, state in zip(self.optimizers, checkpoint.pop("optimizer_states", ()), strict=False):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.load_state_dict(sharded_checkpoint.cut_as(state, parameters))
        return checkpoint

    def _load_directory(self, path: Path, *, strict: bool) -> dict[str, Any]:
        """Load weights, then optimizers one by one, since an optimizer without a step has no saved state."""
        model = self.model
        assert model is not None
        rest = read_checkpoint(path)
        weights: dict[str, Any] = {"state_dict": get_model_state_dict(model)}
        load_into(weights, path)
        model.load_state_dict(weights["state_dict"], strict=strict)
        for number, optimizer in enumerate(self.optimizers):
            if sharded_checkpoint.has_key(path, f"optimizer_{number}.state"):
                key, options = f"optimizer_{number}", StateDictOptions(cpu_offload=True)
                state: dict[str, Any] = {key: get_optimizer_state_dict(model, optimizer)}
                load_into(state, path)
                set_optimizer_state_dict(model, optimizer, optim_state_dict=state[key], options=options)
        return {VERSION: lightning.__version__, **rest}

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint. If the run is killed meanwhile, the rest is not considered complete."""
        if self.is_global_zero:
            sharded_checkpoint.remove_whole(Path(filepath))


def shard_modules(
    model: nn.Module, mesh: DeviceMesh, patterns: tuple = (), *, reshard_after_forward: bool = True
) -> None:
    """Apply ``fully_shard`` to the chosen modules and then to the model.

    Args:
        model: The model, which is changed in place. A model that is already sharded is not changed.
        mesh: One dimension of ranks.
        patterns: Globs or classes; none: the members of every list and sequence that hold parameters.
        reshard_after_forward: As for ``fully_shard``.

    Raises:
        PolicyError: If a pattern matches nothing.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return
    chosen = match_modules(model, patterns) if patterns else _members(model)
    for module in reversed(chosen.values()):
        if module is not model:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    # Lightning calls these instead of the forward method of a LightningModule.
    for method in STEP_METHODS:
        if hasattr(model, method):
            register_fsdp_forward_method(model, method)


def _members(model: nn.Module) -> dict[str, nn.Module]:
    return {
        f"{name}.{key}": member
        for name, container in model.named_modules()
        if isinstance(container, nn.ModuleList | nn.Sequential)
        for key, member in container.named_children()
        if any(True for _ in member.parameters()) and not isinstance(member, nn.ModuleList)
    }


def _already_sharded() -> None:
    """Replace ``configure_model`` in a sharded module."""
