"""Freezing a compiled module ends where freezing the plain one does, with code for each phase."""

import lightning
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import gradpolicy as gp
from gradpolicy.freezing import requires_grad
from gradpolicy.freezing.requires_grad import MOST_PHASES
from tests.fixtures import quiet_trainer
from tests.freezing.conftest import freezer_of

STEPS = 8
SOURCES = {
    "layerwise": lambda: gp.masks.Layerwise(active=1, every=2),
    "gradual": lambda: gp.masks.Gradual(every=2, unit="step"),
    "block_cyclic": lambda: gp.masks.BlockCyclic(every=2),
    "fixed": lambda: gp.masks.Fixed(["*.layers.1.*", "*.head.*"]),
    # Holds for a while; then all trains.
    "until": lambda: gp.masks.Fixed(["*.head.*"]),
}
pytestmark = pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")


class Rounded(nn.Module):
    def __init__(self, layers):
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


# Torch 2.13 finds the code of a phase again.
one_graph_a_phase = pytest.mark.skipif(not MOST_PHASES, reason="torch is older than 2.13")


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield
    torch._dynamo.reset()


def compiled_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def trained(model, policies, steps=STEPS):
    """The weights after training, by plain name."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(64, 4, generator=generator), torch.randint(2, (64,), generator=generator)
    trainer = quiet_trainer(max_steps=steps, max_epochs=None, callbacks=[gp.GradientPolicies(policies)])
    data = torch.utils.data.TensorDataset(inputs, labels)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    return {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def policies_of(source):
    when = gp.When(stop=STEPS // 2) if source == "until" else gp.When()
    freeze = gp.Freeze(SOURCES[source](), params="net.*", when=when)
    return {"quantiser": gp.StraightThrough(ops=["round"]), "trunk": freeze}


@pytest.mark.supports("tensors", "flow", loop="lightning", compiled=True)
@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_module_ends_as_the_plain_one(backend, source, recwarn):
    before = Module().state_dict()
    expected = trained(Module(), policies_of(source))
    found = trained(Module(backend), policies_of(source))
    moved = [name for name in before if "weight" in name and not torch.equal(before[name], expected[name])]
    assert len(moved) >= 2
    if backend == "inductor":
        torch.testing.assert_close(found, expected)
    else:
        assert_same(found, expected)
    assert not [each for each in recwarn if "no gradient gets there" in str(each.message)]


@pytest.mark.slow
def test_a_module_compiled_as_a_whole_ends_as_the_plain_one():
    expected = trained(Module(), policies_of("block_cyclic"))
    found = trained(torch.compile(Module(), backend="aot_eager"), policies_of("block_cyclic"))
    assert_same(found, expected)


def block_cyclic():
    return {"trunk": gp.Freeze(gp.masks.BlockCyclic(every=1), params="net.*")}


@pytest.mark.parametrize(
    ("most", "graphs"),
    [
        # Nine layers take turns; after eight times torch would give up, and raise with fullgraph.
        pytest.param(64, 9, marks=pytest.mark.slow),
        # All later phases share the code that computes every gradient.
        (3, 4),
    ],
)
@one_graph_a_phase
def test_each_phase_is_compiled_once(monkeypatch, most, graphs):
    monkeypatch.setattr(requires_grad, "MOST_PHASES", most)
    expected = trained(Module(layers=8), block_cyclic(), steps=20)
    found = trained(Module("eager", layers=8), block_cyclic(), steps=20)
    assert compiled_graphs() == graphs
    assert_same(found, expected)


@one_graph_a_phase
def test_what_is_frozen_leaves_the_compiled_backward_pass():
    """Counts the products of the backward graphs: one less for each linear layer that needs none."""
    products = []

    def count(graph, inputs):
        products.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=count)
    policies = {"trunk": gp.Freeze(gp.masks.Gradual(every=1, unit="step"), params="net.*")}
    trained(Module(backend, layers=3), policies, steps=5)
    # The head alone; then one more layer each time, with the product that goes on to it.
    assert products == [1, 3, 5, 7]


class Alternates(nn.Module):
    """The model of pytorch#139476: a count in its forward, and a layer that freezes every second time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer1 = nn.Linear(8, 8)
        self.layer2 = nn.Linear(8, 8)
        self.num_iter = 0

    def forward(self, x):
        x = self.layer2(x + self.layer1.bias)
        self.num_iter += 1
        return x


@pytest.mark.supports("tensors", loop="plain", compiled=True)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_example_of_pytorch_139476_trains_as_it_does_uncompiled(backend):
    weights = []
    for model in (Alternates(), torch.compile(Alternates(), backend=backend, fullgraph=True)):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
        frozen = gp.Freeze(gp.masks.Fixed(), params="layer2.*", when=gp.When(every=2))
        moved = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gp.training(model, optimizer, [frozen]) as optimizer:
            for _ in range(6):
                before = model.layer2.weight.detach().clone()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                moved.append(not torch.equal(before, model.layer2.weight))
        assert moved == [False, True] * 3
        weights.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(weights[1], weights[0])


class Decorated(nn.Linear):
    """A layer whose class has its forward compiled."""

    @torch.compile(backend="eager")
    def forward(self, x):
        return super().forward(x)


def compiled_by_its_forward(layer):
    layer.forward = torch.compile(layer.forward, backend="eager")
    return layer


COMPILED = {
    "a module": lambda layer: torch.compile(layer, backend="eager"),
    "in place": lambda layer: layer.compile(backend="eager") or layer,
    "its forward": compiled_by_its_forward,
    "its class": lambda layer: Decorated(2, 2),
    "within another": lambda layer: torch.compile(nn.Sequential(layer), backend="eager"),
}


def off_after_a_step(model, policy):
    """The names of the parameters whose gradient is turned off in the first step."""
    freezer_of(model, {"layers": policy})[1].begin_step(0)
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


@pytest.mark.parametrize("form", COMPILED)
@pytest.mark.parametrize("one_graph", [True, False])
def test_gradients_of_layers_that_may_thaw_are_off_in_compiled_code_where_torch_follows(
    monkeypatch, form, one_graph
):
    monkeypatch.setattr(requires_grad, "MOST_PHASES", 64 if one_graph else 0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), COMPILED[form](nn.Linear(2, 2)))
    policy = gp.Freeze(gp.masks.BlockCyclic(groups=["0.*", ["1.*", "2.*"]], every=2))
    off = off_after_a_step(model, policy)
    assert off[:2] == ["1.weight", "1.bias"]
    assert len(off) == (4 if one_graph else 2)


def test_gradients_of_what_never_thaws_are_turned_off_in_compiled_code_where_torch_follows():
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager"))
    off = off_after_a_step(model, gp.Freeze(gp.masks.Fixed(), params="1.*"))
    expected = ["1.weight", "1.bias"] if requires_grad.MOST_PHASES else []
    assert [name.replace("_orig_mod.", "") for name in off] == expected
