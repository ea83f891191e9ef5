"""Sources that decide by weights and gradients choose the same for sharded parameters as for whole ones."""

import pytest
import torch
from loops import on_ranks, weights_of
from process_pool import ProcessPool, here
from torch import Tensor, nn

import gradpolicy as gp
from gradpolicy.freezing import Freezer

STEPS = 9
SOURCES = {
    "fisher": lambda: gp.masks.TopK(0.3, by="fisher", window=2, every=3, before="freeze"),
    "wanda": lambda: gp.masks.TopK(0.4, by="wanda", within="row", every=3),
    "zeros": gp.masks.Zeros,
    "ticket": lambda: gp.masks.TopK(0.3, by="change", start=4),
    "rigl": lambda: gp.masks.PruneAndGrow(0.4, every=2, window=2, stop=20),
    "set": lambda: gp.masks.PruneAndGrow(0.4, every=2, grow="random"),
}


def run(kind: str, sharded: bool, resumed_at: int | None = None) -> dict[str, Tensor]:
    """Trains with a source and gives the whole weights; optionally with all state saved and loaded once."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)]).double().to(here())
    for layer in model if kind == "zeros" else ():
        layer.weight.data[:, ::2] = 0.0
    if sharded:
        on_ranks(model, "fsdp2", layers=True)
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))

    def engine() -> Freezer:
        params = "*.weight" if kind == "wanda" else "*"
        policy = gp.Freeze(SOURCES[kind](), params=params, frozen_state="zero")
        return Freezer(model, [optimizer], {"policy": policy}, seed=3)

    freezer = engine()
    x = torch.randn(6, 5, dtype=torch.float64).to(here())
    for step in range(STEPS):
        if step == resumed_at:
            state = freezer.state_dict()
            freezer.restore()
            freezer = engine()
            freezer.load_state_dict(state)
        freezer.begin_step(step)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        freezer.observe(freezer.optimizers[0])
        optimizer.step()
    return weights_of(model)


@pytest.mark.supports("gradient sources", loop="plain", processes="fsdp2")
@pytest.mark.mostly_slow
@pytest.mark.parametrize("kind", SOURCES)
def test_two_ranks_train_as_one(pair: ProcessPool, kind: str) -> None:
    alone = run(kind, sharded=False)
    assert kind != "zeros" or not alone["1.weight"][:, ::2].any()
    for together in (*pair(run, kind, True), *pair(run, kind, True, 5)):
        for name, weight in alone.items():
            torch.testing.assert_close(together[name], weight, rtol=0, atol=1e-12)
