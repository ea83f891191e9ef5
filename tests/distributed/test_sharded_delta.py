"""Files of what changed, for models that FSDP2 shards: the same file as of the whole model, and back."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from loops import on_ranks, weights_of
from process_pool import ProcessPool, here, refusal
from torch import nn

import gradpolicy as gp
from gradpolicy.delta.file import read
from gradpolicy.tensors.sharding import write_entries


def network() -> nn.Sequential:
    """Five rows are cut into three and two; of one row the second rank has nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1), nn.Linear(1, 1), nn.Linear(1, 5), nn.Linear(5, 5))
    nn.init.zeros_(model[1].bias)
    nn.init.zeros_(model[2].bias)
    model[4].weight = model[0].weight
    return model.to(here())


def sharded(model: nn.Sequential) -> nn.Sequential:
    return on_ranks(model, "fsdp2")


def change(model: nn.Sequential) -> None:
    """A row, an entry, and what lies on the first rank alone."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            write_entries(tensor, torch.tensor([0]), torch.tensor([3.0 + len(name)], device=here()))


def there_and_back(folder: Path) -> tuple[bool, bool]:
    model = sharded(network())
    base, start = copy.deepcopy(model.state_dict()), weights_of(model)
    change(model)
    end = weights_of(model)
    path = folder / f"sharded-{dist.get_rank()}.safetensors"
    gp.delta.save(path, model, base)
    other = sharded(network())
    gp.delta.apply(other, path)
    applied = all(torch.equal(tensor, end[name]) for name, tensor in weights_of(other).items())
    gp.delta.revert(other, path)
    reverted = all(torch.equal(tensor, start[name]) for name, tensor in weights_of(other).items())
    return applied, reverted


def patched() -> bool:
    """A patch of a step of the sharded model gives another of the same base the same weights."""
    model, other = sharded(network()), sharded(network())
    half = gp.Freeze(gp.masks.Random(0.5))
    with gp.training(model, torch.optim.AdamW(model.parameters(), lr=0.1), [half]) as optimizer:
        model(torch.ones(3, 5, device=here())).square().sum().backward()
        optimizer.step()
        patch = gp.delta.patch(optimizer, model)
    assert 0 < sum(len(values) for _, values in patch.values()) < sum(p.numel() for p in model.parameters())
    gp.delta.apply_patch(other, patch)
    return all(torch.equal(tensor, weights_of(model)[name]) for name, tensor in weights_of(other).items())


@pytest.mark.supports("patches", loop="plain", processes="fsdp2")
def test_a_patch_is_of_the_whole_model(pair: ProcessPool) -> None:
    assert pair(patched) == [True, True]


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
        model.state_dict()["1.weight"].to_local().add_(1.0)  # the second rank has nothing of it
    return refusal(gp.delta.apply, model, path)


def test_another_base_is_refused_on_every_rank(pair: ProcessPool, tmp_path: Path) -> None:
    model, path = network(), tmp_path / "alone.safetensors"
    base = copy.deepcopy(model.state_dict())
    change(model)
    gp.delta.save(path, model, base)
    assert all("1.weight differs" in message for message in pair(refused, path))


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
