"""What training loops on ranks have in common: models, their shares of a batch, and checkpoints."""

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from process_pool import here
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradpolicy.tensors.sharding import full_tensor


def all_ranks() -> DeviceMesh:
    return init_device_mesh(here().type, (dist.get_world_size(),))


def on_ranks(model: nn.Module, kind: str, layers: bool = False) -> nn.Module:
    """What a loop calls: the model, wrapped for ``"ddp"``, or sharded for ``"fsdp2"``.

    Args:
        model: The model; sharded, it stays the same object.
        kind: As above; anything else for one process alone.
        layers: Whether to shard each child with parameters on its own, too.
    """
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        for child in model.children() if layers else ():
            if list(child.parameters()):
                fully_shard(child, mesh=all_ranks())
        fully_shard(model, mesh=all_ranks())
    return model


def share(batch: Tensor, kind: str) -> Tensor:
    """This rank's part of a batch; all of it on ``"one process"``."""
    return batch if kind == "one process" else batch.chunk(dist.get_world_size())[dist.get_rank()]


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor of which each rank may hold a part."""
    return full_tensor(tensor.detach()).clone()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def save(folder: str, model: nn.Module, optimizer: Any, **options: bool) -> None:
    """Write a checkpoint of `torch.distributed.checkpoint`; options as those of its state dicts."""
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: Any, **options: bool) -> None:
    given = StateDictOptions(**options)
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=given), strict=True))
    dcp.load(saved, checkpoint_id=folder)
    take_up(saved, model, optimizer, options=given)


def take_up(saved: dict[str, Any], model: nn.Module, optimizer: Any, **settings: Any) -> None:
    """Give a model and its optimizer the states of a checkpoint that was read."""
    states = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
    set_state_dict(model, optimizer, **states, **settings)
