"""Weights that are masked in the forward pass train on two ranks as on one process."""

from typing import Any

import pytest
import torch
from loops import on_ranks, share, weights_of
from networks import perceptron
from process_pool import ProcessPool, here
from torch import Tensor

import gradpolicy as gp

STEPS = 6


def trained(kind: str, by: str, level: str, resumed_at: int | None = None) -> dict[str, Tensor]:
    """The masked and the whole weights; optionally with all state saved and loaded once."""
    model = perceptron(8, 8, 8, 8).double()
    given = on_ranks(model, kind)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double().to(here())
    x = share(x, kind)

    def begun() -> Any:
        source = gp.masks.TopK(None if level == "2:4" else 0.3, level=level, by=by, every=2)
        policy = gp.ForwardMask(source, params="*.weight", decay=0.01)
        return gp.training(given, torch.optim.AdamW(model.parameters(), lr=0.05), [policy])

    def train(optimizer: Any, steps: range) -> None:
        for _ in steps:
            given(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with begun() as optimizer:
        train(optimizer, range(resumed_at or 0))
        state, weights = optimizer.state_dict(), model.state_dict()
    with begun() as optimizer:
        if resumed_at is not None:
            optimizer.load_state_dict(state)
            model.load_state_dict(weights)
        train(optimizer, range(resumed_at or 0, STEPS))
        found = weights_of(model)
        with optimizer.whole_weights():
            return found | {f"whole {name}": weight for name, weight in weights_of(model).items()}


@pytest.mark.supports("forward masks", loop="plain", processes="{kind}")
@pytest.mark.parametrize(
    ("kind", "by", "level"),
    [
        ("ddp", "magnitude", "entry"),
        ("ddp", "snip", "entry"),
        ("fsdp2", "magnitude", "2:4"),
        ("fsdp2", "magnitude", "entry"),
    ],
)
def test_two_ranks_train_as_one(pair: ProcessPool, kind: str, by: str, level: str) -> None:
    alone = trained("one process", by, level)
    assert (alone["2.weight"] == 0).float().mean() >= 0.5
    assert alone["whole 2.weight"].all()
    for together in (*pair(trained, kind, by, level), *pair(trained, kind, by, level, 3)):
        for name, weight in alone.items():
            torch.testing.assert_close(together[name], weight, rtol=0, atol=1e-12)
            assert torch.equal(together[name] == 0, weight == 0), name
