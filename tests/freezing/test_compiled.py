"""Freezing a compiled module ends where freezing the plain one does: layers that thaw train again."""

import lightning
import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.freezing import Freezer

STEPS = 8
SOURCES = {
    "layerwise": lambda: gp.masks.Layerwise(active=1, every=2),
    "gradual": lambda: gp.masks.Gradual(every=2, unit="step"),
    "block_cyclic": lambda: gp.masks.BlockCyclic(every=2),
    "progressive": lambda: gp.masks.Progressive(total=STEPS, first=0.3),
    "stable": lambda: gp.masks.Stable(every=2),
    "fixed": lambda: gp.masks.Fixed(["*.layers.1.*", "*.head.*"]),
    # Holds for a while; then all trains.
    "until": lambda: gp.masks.Fixed(["*.head.*"]),
}
BACKENDS = [
    pytest.param("eager", marks=pytest.mark.slow),
    pytest.param("aot_eager", marks=pytest.mark.slow),
    pytest.param("inductor", marks=pytest.mark.slow),
]
pytestmark = pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")


class Rounded(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(layers)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + torch.round(x)
        return self.head(x)


class Module(lightning.LightningModule):
    def __init__(self, backend=None, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.net = Rounded(layers)
        if backend is not None:
            self.net = torch.compile(self.net, backend=backend, fullgraph=True)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(model, policies, steps=STEPS):
    """The weights after training, by plain name."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(64, 4, generator=generator), torch.randint(2, (64,), generator=generator)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[gp.GradientPolicies(policies)],
    )
    data = torch.utils.data.TensorDataset(inputs, labels)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    return {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}


def policies_of(source):
    when = gp.When(stop=STEPS // 2) if source == "until" else None
    freeze = gp.Freeze(SOURCES[source](), params="net.*", **({} if when is None else {"when": when}))
    return {"quantiser": gp.StraightThrough(ops=["round"]), "trunk": freeze}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_module_ends_as_the_plain_one(backend, source, recwarn):
    before = Module().state_dict()
    expected = trained(Module(), policies_of(source))
    found = trained(Module(backend), policies_of(source))
    moved = [name for name in before if "weight" in name and not torch.equal(before[name], expected[name])]
    assert len(moved) >= 2
    for name, value in expected.items():
        if backend == "inductor":
            torch.testing.assert_close(found[name], value)
        else:
            assert torch.equal(found[name], value), name
    assert not [each for each in recwarn if "no gradient gets there" in str(each.message)]


def test_a_module_compiled_as_a_whole_ends_as_the_plain_one():
    expected = trained(Module(), policies_of("block_cyclic"))
    found = trained(torch.compile(Module(), backend="aot_eager"), policies_of("block_cyclic"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_code_is_compiled_once_however_many_layers_take_turns():
    """After eight times torch gives up, and raises with fullgraph."""
    policies = {"trunk": gp.Freeze(gp.masks.BlockCyclic(every=1), params="net.*")}
    expected = trained(Module(layers=10), policies, steps=11)
    policies = {"trunk": gp.Freeze(gp.masks.BlockCyclic(every=1), params="net.*")}
    counts = torch._dynamo.utils.counters["stats"]
    counts.clear()
    found = trained(Module("eager", layers=10), policies, steps=11)
    assert counts["unique_graphs"] == 1
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Decorated(nn.Linear):
    """A layer whose class has its forward compiled."""

    @torch.compile(backend="eager")
    def forward(self, x):
        return super().forward(x)


def compiled_in_place(layer):
    layer.compile(backend="eager")
    return layer


def compiled_by_its_forward(layer):
    layer.forward = torch.compile(layer.forward, backend="eager")
    return layer


COMPILED = {
    "a module": lambda layer: torch.compile(layer, backend="eager"),
    "in place": compiled_in_place,
    "its forward": compiled_by_its_forward,
    "its class": lambda layer: Decorated(2, 2),
    "within another": lambda layer: torch.compile(nn.Sequential(layer), backend="eager"),
}


def off_after_a_step(model, policy):
    """The names of the parameters whose gradient is turned off in the first step."""
    optimizer = gp.MaskedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    freezer = Freezer(model, [optimizer], {"layers": policy}, seed=0)
    freezer.begin_step(0)
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


@pytest.mark.parametrize("form", COMPILED)
def test_gradients_of_layers_that_may_thaw_stay_on_in_compiled_code_alone(form):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), COMPILED[form](nn.Linear(2, 2)))
    policy = gp.Freeze(gp.masks.BlockCyclic(groups=["0.*", ["1.*", "2.*"]], every=2))
    assert off_after_a_step(model, policy) == ["1.weight", "1.bias"]


def test_gradients_of_what_never_thaws_are_turned_off_in_compiled_code_where_torch_follows():
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager"))
    off = off_after_a_step(model, gp.Freeze(gp.masks.Fixed(), params="1.*"))
    follows = torch.__version__ >= (2, 12)
    assert [name.replace("_orig_mod.", "") for name in off] == (["1.weight", "1.bias"] if follows else [])
