"""Layers that are frozen as a whole under FSDP2 have no gradient, and train once they thaw."""

import pytest
import torch
from loops import all_ranks
from networks import perceptron
from process_pool import ProcessPool, here
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradpolicy as gp


def trained(mixed: bool) -> list[tuple[list[str], set[torch.dtype], list[str]]]:
    """For each step the layers with a gradient, its dtypes, and the layers of which the pass computed one."""
    model = perceptron(6, 5, 4, 3).to(here())
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
    for module in (*model.children(), model):
        fully_shard(module, mesh=all_ranks(), mp_policy=MixedPrecisionPolicy(**dtypes))
    turns = gp.Freeze(gp.masks.BlockCyclic(every=2), params="*")
    found = []
    with gp.training(model, torch.optim.AdamW(model.parameters()), [turns]) as optimizer:
        for _ in range(6):
            loss = model(torch.ones(4, 6, device=here())).float().square().mean()
            computed = [name for name, p in model.named_parameters() if p.requires_grad]
            loss.backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found.append((list(gradients), {each.dtype for each in gradients.values()}, computed))
            optimizer.step()
            optimizer.zero_grad()
    return found


MIXED = pytest.mark.supports("mixed precision", loop="plain", processes="fsdp2")


@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=MIXED)])
def test_the_backward_pass_leaves_frozen_layers_out_after_the_first(pair: ProcessPool, mixed: bool) -> None:
    for found in pair(trained, mixed):
        for step, (names, dtypes, computed) in enumerate(found):
            active = 2 * (step // 2)
            assert names == [f"{active}.weight", f"{active}.bias"]
            assert dtypes == {torch.float32}
            assert computed == names if step else len(computed) == 6
