"""Files of what changed, for models that FSDP2 shards: the same file as of the whole model, and back."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from process_pool import ProcessPool, here
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradpolicy as gp
from gradpolicy.delta.file import read
from gradpolicy.errors import PolicyError
from gradpolicy.tensors.sharding import full_tensor, write_entries


def network() -> nn.Sequential:
    """Five rows are cut into three and two; of one row the second rank has nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1), nn.Linear(1, 1), nn.Linear(1, 5), nn.Linear(5, 5))
    nn.init.zeros_(model[1].bias)
    nn.init.zeros_(model[2].bias)
    model[4].weight = model[0].weight
    return model.to(here())


def sharded(model: nn.Sequential) -> nn.Sequential:
    return fully_shard(model, mesh=init_device_mesh(here().type, (dist.get_world_size(),)))


def change(model: nn.Sequential) -> None:
    """A row, an entry, and what lies on the first rank alone."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            write_entries(tensor, torch.tensor([0]), torch.tensor([3.0 + len(name)], device=here()))


def state_of(model: nn.Sequential) -> dict[str, Tensor]:
    return {name: full_tensor(tensor).clone() for name, tensor in model.state_dict().items()}


def there_and_back(folder: Path) -> tuple[bool, bool]:
    model = sharded(network())
    base, start = copy.deepcopy(model.state_dict()), state_of(model)
    change(model)
    end = state_of(model)
    path = folder / f"sharded-{dist.get_rank()}.safetensors"
    gp.delta.save(path, model, base)
    other = sharded(network())
    gp.delta.apply(other, path)
    applied = all(torch.equal(tensor, end[name]) for name, tensor in state_of(other).items())
    gp.delta.revert(other, path)
    reverted = all(torch.equal(tensor, start[name]) for name, tensor in state_of(other).items())
    return applied, reverted


@pytest.mark.supports("delta", loop="plain", processes="fsdp2")
def test_it_is_the_file_of_the_whole_model(pair: ProcessPool, tmp_path: Path) -> None:
    model = network()
    base = copy.deepcopy(model.state_dict())
    change(model)
    alone = gp.delta.save(tmp_path / "alone.safetensors", model, base)
    assert len(alone.tensors) == 10
    assert pair(there_and_back, tmp_path) == [(True, True), (True, True)]
    expected = read(tmp_path / "alone.safetensors")
    for rank in (0, 1):
        found = read(tmp_path / f"sharded-{rank}.safetensors")
        assert found.base == expected.base
        assert found.changes.keys() == expected.changes.keys()
        for name, part in found.changes.items():
            assert torch.equal(part.values, expected.changes[name].values)
        assert found.changes["4.weight"] is found.changes["0.weight"]


def refused(path: Path) -> str:
    model = sharded(network())
    with torch.no_grad():
        local = model.state_dict()["1.weight"].to_local()
        local += 1.0  # the second rank has nothing of it
    try:
        gp.delta.apply(model, path)
    except PolicyError as error:
        return str(error)
    return ""


def test_another_base_is_refused_on_every_rank(pair: ProcessPool, tmp_path: Path) -> None:
    model, path = network(), tmp_path / "alone.safetensors"
    base = copy.deepcopy(model.state_dict())
    change(model)
    gp.delta.save(path, model, base)
    messages = pair(refused, path)
    assert all("1.weight differs" in message for message in messages), messages


def one_row(folder: Path) -> int:
    """Of this model the second rank has nothing at all."""
    torch.manual_seed(0)
    model = sharded(nn.Linear(4, 1))
    base = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.state_dict()["weight"].to_local().add_(1.0)
    return len(gp.delta.save(folder / "row.safetensors", model, base).tensors)


def test_a_rank_may_hold_nothing(pair: ProcessPool, tmp_path: Path) -> None:
    assert pair(one_row, tmp_path) == [1, 1]
