"""FSDP2 for a LightningModule that does not shard itself."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from gradpolicy.errors import PolicyError
from gradpolicy.tensors.sharding import shard_like
from gradpolicy.train.lightning.checkpoints import read_checkpoint
from gradpolicy.train.lightning.trainer_parts import STEP_METHODS
from gradpolicy.where import as_patterns, match_modules


class FullyShardStrategy(ModelParallelStrategy):
    """Shards parameters, gradients and optimizer state over all ranks (FSDP2).

    Lightning's ModelParallelStrategy needs a module with a ``configure_model`` that shards it. If there is
    none, this strategy shards the module: the parameters of each submodule that ``modules`` matches are
    gathered and freed together, and all others with the root.

    A checkpoint is one file, as one process would write it: the first rank gathers all tensors in its memory,
    not its accelerator's. Every strategy loads it, on any number of ranks.

    Args:
        modules: Globs or classes of the modules to shard one by one, such as ``"model.layers.*"``; None: the
            members of every ``nn.ModuleList`` and ``nn.Sequential`` that hold parameters.
        reshard_after_forward: Free the gathered parameters after the forward pass and gather them again for
            the backward pass: less memory, 50 % more traffic.
        **settings: As for ModelParallelStrategy.

    Raises:
        PolicyError: If a pattern matches nothing, or for ``save_distributed_checkpoint=True``.
    """

    def __init__(
        self,
        modules: str | Iterable[str] | None = None,
        *,
        reshard_after_forward: bool = True,
        **settings: Any,
    ) -> None:
        settings = {"tensor_parallel_size": 1, "save_distributed_checkpoint": False, **settings}
        if settings["save_distributed_checkpoint"]:
            raise PolicyError("FullyShardStrategy.save_distributed_checkpoint: a checkpoint is one file")
        super().__init__(**settings)
        self.modules = as_patterns(modules)
        self.reshard_after_forward = reshard_after_forward

    def setup_environment(self) -> None:
        """Use all ranks for the data-parallel dimension, and give the module a hook that shards it."""
        if self._data_parallel_size == "auto":
            ranks = self.num_nodes * self.num_processes
            self._data_parallel_size = ranks // int(self._tensor_parallel_size)
        super().setup_environment()
        module, mesh = self.lightning_module, self.device_mesh["data_parallel"]
        assert module is not None
        # Not of a module that shards itself.
        if type(module).configure_model is LightningModule.configure_model:
            reshard = self.reshard_after_forward
            shard = partial(shard_modules, module, mesh, self.modules, reshard_after_forward=reshard)
            module.configure_model = shard  # type: ignore[method-assign]

    def setup(self, trainer: Trainer) -> None:
        """Remove the hook, which Lightning has called and looks for once more."""
        super().setup(trainer)
        vars(self.lightning_module).pop("configure_model", None)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of any strategy, and of any number of ranks.

        Args:
            checkpoint_path: The checkpoint; the path of the first rank is used.
            weights_only: Ignored: only tensors and plain values are ever read.

        Raises:
            PolicyError: If it is damaged, has NaN weights, or contains code.
        """
        module = self.lightning_module
        assert module is not None
        checkpoint = read_checkpoint(Path(self.broadcast(checkpoint_path)))
        options = StateDictOptions(full_state_dict=True, strict=module.strict_loading)
        set_model_state_dict(module, checkpoint.pop("state_dict"), options=options)
        for optimizer, state in zip(self.optimizers, checkpoint.pop("optimizer_states", ()), strict=False):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.load_state_dict(cut_as(state, parameters))
        return checkpoint


def cut_as(state: Mapping[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """Shard an optimizer's state_dict as its parameters are sharded.

    Args:
        state: The full state by parameter number, the same on every rank.
        parameters: The parameters in the order of the optimizer's groups; DTensors or plain.

    Returns:
        The state in which every tensor of its parameter's shape is sharded as the parameter is.
    """

    def cut(value: Any, parameter: Tensor) -> Any:
        matches = isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
        return shard_like(value, parameter) if matches else value

    entries = {
        number: {key: cut(value, parameters[number]) for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}


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
