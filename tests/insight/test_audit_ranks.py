"""The audit on two processes: each checks what it holds, and one file tells of both."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from process_pool import ProcessPool, RemoteError, here
from runs import STRATEGIES
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import gradpolicy as gp
from gradpolicy.freezing import Freezer
from gradpolicy.insight.audit import Audit
from gradpolicy.tensors.sharding import local_shard
from tests.fixtures import TwoLayers, quiet_trainer


def watched(entries: int, masks: str, planted: bool) -> tuple[int, list]:
    """Entries compared over a few updates of a sharded model, and what was found."""
    torch.manual_seed(0)
    # Five rows on two ranks do not divide evenly.
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).to(here())
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    sources = {
        "entries": lambda: gp.masks.Random(0.5, every=2),
        "rows": lambda: gp.masks.Random(0.5, every=2, level="row"),
        "whole": lambda: gp.masks.Fixed(False),
    }
    freezer = Freezer(model, [optimizer], {"some": gp.Freeze(sources[masks](), params="0.*")}, seed=0)
    audit = Audit(entries=entries)
    audit._freezer = freezer
    freezer.observers.append(audit)
    for step in range(6):
        freezer.begin_step(step)
        model(torch.ones(2, 4, device=here())).sum().backward()
        audit.on_after_backward(None, None)
        freezer.observe(freezer.optimizers[0])
        optimizer.step()
        optimizer.zero_grad()
        if planted and step == 2 and dist.get_rank() == 1:
            local_shard(model[0].weight.detach()).add_(1)
    audit._compare(["0.weight", "0.bias"])
    found = audit._counted
    return found.entries, [each.partition(" of ")[0] for each in found.differences]


@pytest.mark.supports("audit", loop="plain", processes="fsdp2")
@pytest.mark.parametrize("masks", ["entries", "rows", "whole"])
@pytest.mark.parametrize("entries", [4096, 4])
def test_shards_of_frozen_entries_keep_their_bits(pair: ProcessPool, entries: int, masks: str) -> None:
    for compared, found in pair(watched, entries, masks, False):
        assert compared > 0
        assert found == []


def test_a_write_to_one_shard_is_found_on_its_rank(pair: ProcessPool) -> None:
    # Rank 1 holds two rows of four.
    (_, first), (_, second) = pair(watched, 4096, "whole", True)
    assert first == []
    assert second == ["0.weight (policy.some): 8"]


def write_on_rank_one(trainer, pl_module) -> None:
    if trainer.global_rank == 1:
        pl_module.trunk[0].weight.data[0, 0] += 1


def train_under_an_audit(folder: Path, planted: bool) -> None:
    callbacks = [
        Audit(folder),
        gp.GradientPolicies({"trunk": gp.Freeze(gp.masks.Fixed(False), params="trunk.*")}),
        *([LambdaCallback(on_train_end=write_on_rank_one)] if planted else []),
    ]
    accelerator = "gpu" if here().type == "cuda" else "cpu"
    settings = {"accelerator": accelerator, "strategy": STRATEGIES["ddp"](), "devices": 2, "max_steps": 2}
    data = DataLoader(TensorDataset(torch.randn(32, 4), torch.arange(32) % 2), batch_size=8)
    quiet_trainer(callbacks=callbacks, default_root_dir=folder, **settings).fit(TwoLayers(), data)


@pytest.mark.supports("audit", loop="lightning", processes="ddp")
@pytest.mark.parametrize("planted", [False, True])
def test_one_file_tells_of_both_ranks(pair: ProcessPool, tmp_path: Path, planted: bool) -> None:
    if planted:
        with pytest.raises(RemoteError, match=r"audit: trunk\.0\.weight"):
            pair(train_under_an_audit, tmp_path, planted)
    else:
        pair(train_under_an_audit, tmp_path, planted)
    report = json.loads((tmp_path / "audit.json").read_text())
    # Four tensors on two ranks.
    assert report["intervals"] == 4 * 2
    assert report["changed"] == planted
    assert ["on rank 1" in each for each in report["differences"]] == [True] * planted
