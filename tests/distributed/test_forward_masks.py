"""Weights that are masked in the forward pass, under DistributedDataParallel on two ranks."""

import pytest
import torch
import torch.distributed as dist
from networks import perceptron
from process_pool import ProcessPool, here
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradpolicy as gp


def trained(by: str, ranks: int, resumed_at: int | None = None) -> dict[str, Tensor]:
    """The masked and the whole weights after six updates; optionally with the state loaded once."""
    model = perceptron(8, 8, 8).double()
    given: nn.Module = DistributedDataParallel(model) if ranks > 1 else model
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double().to(here())
    x = x.chunk(ranks)[dist.get_rank() if ranks > 1 else 0]
    policy = gp.ForwardMask(gp.masks.TopK(0.3, by=by, every=2), params="*.weight", decay=0.01)
    with gp.training(given, torch.optim.AdamW(model.parameters(), lr=0.05), [policy]) as optimizer:
        for step in range(6):
            if step == resumed_at:
                optimizer.load_state_dict(optimizer.state_dict())
            given(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        with optimizer.whole_weights():
            found |= {f"whole {name}": p.detach().clone() for name, p in model.named_parameters()}
    return found


@pytest.mark.supports("forward masks", loop="plain", processes="ddp")
@pytest.mark.parametrize("by", ["magnitude", "snip"])
def test_two_ranks_train_as_one(pair: ProcessPool, by: str) -> None:
    alone = trained(by, 1)
    weights = [weight for name, weight in alone.items() if name in ("0.weight", "2.weight")]
    assert sum(int((weight == 0).sum()) for weight in weights) > 0.6 * 128
    assert alone["whole 0.weight"].all()
    for together in (*pair(trained, by, 2), *pair(trained, by, 2, 3)):
        for name, weight in alone.items():
            torch.testing.assert_close(together[name], weight, rtol=0, atol=1e-12)
            assert torch.equal(together[name] == 0, weight == 0), name
