"""With `gradpolicy.training` a model trains as it does uncompiled, however it is compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradpolicy as gp

STEPS = 7
HIDDEN = "layers.*.weight"
WINDOW = gp.When(start=2, stop=5)
FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "tensors": lambda: {"one": gp.Freeze(gp.masks.Layerwise(active=1, every=2), frozen_state="drop")},
    "rows": lambda: {"one": gp.Freeze(gp.masks.Random(0.4, level="row", every=2), params=HIDDEN)},
    "entries": lambda: {"one": gp.Freeze(gp.masks.Random(0.4, every=3), frozen_state="zero")},
    "gradient sources": lambda: {
        "one": gp.Freeze(gp.masks.PruneAndGrow(0.5, every=2, stop=20), params=HIDDEN),
    },
    "rates": lambda: {
        "one": gp.Rates({"layers.0.*": 0.1, "*.bias": {"lr": gp.schedules.Linear(1.0, 0.0, steps=6)}}),
    },
    "phases": lambda: {
        "one": gp.Freeze(gp.masks.Phases([{"params": "head.*", "until": {"steps": 3}}, {"params": "*"}])),
    },
    "flow": lambda: {
        "cut": gp.Stop(modules="probe", when=WINDOW),
        "less": gp.Scale(gp.schedules.Linear(1.0, 0.0, steps=6), modules="layers.1"),
        "across": gp.StraightThrough(modules="norm"),
        "clipped": gp.Clip(norm=0.01, params="layers.0.*", when=WINDOW),
    },
    "all": lambda: {
        "cut": gp.Stop(modules="head", mode="zero", when=WINDOW),
        "across": gp.StraightThrough(modules="norm"),
        "one": gp.Freeze(gp.masks.Random(0.4, every=2), params=HIDDEN, frozen_state="drop"),
    },
}
Call = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.head, self.probe = nn.LayerNorm(8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + 0.1 * x
        x = self.norm(x)
        return self.head(torch.sigmoid(x)).square().mean() + self.probe(torch.tanh(x)).square().mean()


def uncompiled(model: nn.Module) -> tuple[nn.Module, Call]:
    return model, model


def in_place(model: nn.Module) -> tuple[nn.Module, Call]:
    model.compile(backend="aot_eager")
    return model, model


def by_a_wrapper(model: nn.Module) -> tuple[nn.Module, Call]:
    return model, torch.compile(model, backend="aot_eager")


def with_the_wrapper_given(model: nn.Module) -> tuple[nn.Module, Call]:
    compiled = torch.compile(model, backend="aot_eager")
    return compiled, compiled


def trained(compile_: Callable[[nn.Module], tuple[nn.Module, Call]], feature: str) -> dict[str, Tensor]:
    torch.compiler.reset()
    model = Net().double()
    given, call = compile_(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    with gp.training(given, optimizer, FEATURES[feature](), seed=1) as optimizer:
        for step in range(STEPS):
            call(torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).double()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.supports("{feature}", loop="plain", compiled=True, names={"all": "frozen_state"})
@pytest.mark.mostly_slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compile_", [in_place, by_a_wrapper, with_the_wrapper_given])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_compiled_model_trains_as_an_uncompiled_one(
    compile_: Callable[[nn.Module], tuple[nn.Module, Call]], feature: str
) -> None:
    if torch.__version__ < (2, 12) and compile_ is by_a_wrapper and feature in ("tensors", "phases"):
        pytest.skip("compiled code of torch 2.11 ignores requires_grad, and nothing shows the wrapper")
    found, wanted = trained(compile_, feature), trained(uncompiled, feature)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12)


def test_a_full_graph_cannot_hold_the_start_of_an_update() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        gp.training(model, optimizer, FEATURES["entries"]()),
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"give gradpolicy\.training the compiled module"),
    ):
        compiled(torch.ones(2, 8))
