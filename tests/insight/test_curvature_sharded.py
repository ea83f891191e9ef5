"""Curvature of sharded parameters is that of whole ones."""

import pytest
import torch
import torch.distributed as dist
from process_pool import ProcessPool, here
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradpolicy as gp
from gradpolicy.tensors.sharding import full_tensor


def tanh_own(grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return 2 * grad * (1 - output**2)


def figures(sharded: bool, rule: bool) -> dict[str, Tensor]:
    """All that is known of a small network's curvature; each rank has the same batch."""
    torch.manual_seed(3)
    # Five rows on two ranks do not divide evenly.
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).to(here(), torch.float64)
    model[0].bias.grad = torch.ones_like(model[0].bias)
    if sharded:
        mesh = init_device_mesh(here().type, (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4).to(here())
    parameters = dict(model.named_parameters())
    before = {name: full_tensor(parameter.detach()).clone() for name, parameter in parameters.items()}
    ones = {name: torch.ones(parameter.shape, dtype=torch.float64) for name, parameter in parameters.items()}

    def loss() -> Tensor:
        return model(inputs).square().mean()

    def arguments() -> tuple:
        return loss, parameters, 4, torch.Generator().manual_seed(1)

    policies = [gp.UseRule(tanh_own, ops=["tanh"])] if rule else []
    with gp.install(model, policies):
        moved = gp.curvature.gradient_at(loss, parameters, ones)
        product = gp.curvature.hvp(loss, parameters, ones)
        trace = gp.curvature.trace(*arguments())
        norm = gp.curvature.frobenius_norm(*arguments())
        diagonal = gp.curvature.diagonal(*arguments())
        top = gp.curvature.top_eigenvalue(*arguments())
    kept = all(torch.equal(full_tensor(p.detach()), before[name]) for name, p in parameters.items())
    return {
        **{f"moved {name}": full_tensor(tensor) for name, tensor in moved.items()},
        **{f"product {name}": full_tensor(tensor) for name, tensor in product.items()},
        **{f"diagonal {name}": full_tensor(tensor) for name, tensor in diagonal.value.items()},
        "numbers": torch.tensor([trace.value, trace.standard_error, norm.value, top.value]),
        "kept": torch.tensor(kept and model[2].weight.grad is None),
    }


@pytest.mark.slow
@pytest.mark.parametrize("rule", [False, True])
def test_two_ranks_find_what_one_process_finds(pair: ProcessPool, rule: bool) -> None:
    alone = figures(sharded=False, rule=rule)
    assert alone["kept"]
    for found in pair(figures, True, rule):
        assert found.keys() == alone.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, alone[name].cpu(), rtol=1e-7, atol=1e-7, msg=name)
