"""Weights that are masked in the forward pass, sharded by FSDP2 over two ranks."""

import pytest
import torch
import torch.distributed as dist
from process_pool import ProcessPool, here
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradpolicy as gp
from gradpolicy.tensors.sharding import full_tensor

STEPS = 6


def run(level: str, sharded: bool, resumed_at: int | None = None) -> dict[str, Tensor]:
    """Trains and gives the masked and the whole weights; optionally with all state saved and loaded once."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]).double().to(here())
    if sharded:
        mesh = init_device_mesh(here().type, (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x = torch.randn(6, 8, dtype=torch.float64).to(here())

    def policies() -> list[gp.ForwardMask]:
        source = gp.masks.TopK(None if level == "2:4" else 0.3, level=level, by="magnitude", every=2)
        return [gp.ForwardMask(source, params="*.weight", decay=0.01)]

    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    context = gp.training(model, inner, policies())
    optimizer = context.__enter__()
    for step in range(STEPS):
        if step == resumed_at:
            state, weights = optimizer.state_dict(), model.state_dict()
            context.__exit__(None, None, None)
            context = gp.training(model, torch.optim.AdamW(model.parameters(), lr=0.05), policies())
            optimizer = context.__enter__()
            optimizer.load_state_dict(state)
            model.load_state_dict(weights)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}
    with optimizer.whole_weights():
        found |= {f"whole {n}": full_tensor(p.detach()).clone() for n, p in model.named_parameters()}
    context.__exit__(None, None, None)
    return found


@pytest.mark.supports("forward masks", loop="plain", processes="fsdp2")
@pytest.mark.mostly_slow
@pytest.mark.parametrize("level", ["2:4", "entry"])
def test_two_ranks_train_as_one(pair: ProcessPool, level: str) -> None:
    alone = run(level, sharded=False)
    assert (alone["1.weight"] == 0).float().mean() >= 0.5
    assert alone["whole 1.weight"].all()
    for together in (*pair(run, level, True), *pair(run, level, True, 3)):
        for name, weight in alone.items():
            torch.testing.assert_close(together[name], weight, rtol=0, atol=1e-12)
        assert torch.equal(together["1.weight"] == 0, alone["1.weight"] == 0)
