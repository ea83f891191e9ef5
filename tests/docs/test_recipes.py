"""The recipes of the README's table and of AGENTS.md do what their rows say, to every tensor of a model."""

import ast
import copy
import re
from fnmatch import fnmatchcase

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import gradpolicy as gp
from tests.docs.markdown import ROOT, blocks

TABLE = re.compile(
    r"^## Which policy for what\n\n\| you want \| write \|\n\|---\|---\|\n(.*?)\n\n", re.M | re.S
)
Moves = list[dict[str, Tensor]]


def recipes() -> list:
    """Return the recipes of both pages, as code, each with what its row says."""
    rows = TABLE.search((ROOT / "README.md").read_text())[1].splitlines()
    written = [re.fullmatch(r"\| (.+) \| `(.+)` \|", row).groups() for row in rows]
    (page,) = (block for block in blocks(ROOT / "AGENTS.md", "python") if "WRITE = {" in block)
    (node,) = (node.value for node in ast.parse(page).body if isinstance(node, ast.Assign))
    written += [(key.value, ast.unparse(value)) for key, value in zip(node.keys, node.values, strict=True)]
    # What both pages say is tried once.
    once = {(text, code.replace("'", '"')) for text, code in written}
    slow = {True: [pytest.mark.slow], False: []}
    return [pytest.param(*each, id=each[0], marks=slow["1000 steps" in each[0]]) for each in sorted(once)]


# ---- models


def llama(layers: int = 4, vocabulary: int = 40) -> nn.Module:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        attention_bias=True,
        mlp_bias=True,
    )
    return LlamaForCausalLM(config).double()


EMBEDDING, HEAD = ["model.embed_tokens.*"], ["model.norm.*", "lm_head.*"]
RELUS = (nn.ReLU(), functional.relu, Tensor.relu)


class Parts(nn.Module):
    """An encoder, a decoder, a head, a probe and a domain head.

    Args:
        relu: Three functions for ReLU.
        rounding: A function for rounding.
        before: Functions on the input of parts, by name.
    """

    def __init__(self, relu=RELUS, rounding=torch.round, **before):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
        self.decoder, self.head = nn.Linear(12, 6), nn.Linear(6, 4)
        self.probe, self.domain_head = nn.Linear(6, 4), nn.Linear(6, 2)
        self.relu, self.rounding, self.before = relu, rounding, before
        self.double()

    def part(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(name)(self.before.get(name, lambda x: x)(x))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.relu
        hidden = third(second(first(self.encoder(x)) - 0.1) - 0.1).flatten(1)
        hidden = self.part("decoder", hidden)
        hidden = hidden + self.rounding(2 * hidden)
        outputs = [self.part(name, hidden) for name in ("head", "probe", "domain_head")]
        return sum(output.square().mean() for output in outputs)


def loss(model: nn.Module) -> Tensor:
    if isinstance(model, Parts):
        images = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1)).double()
        return model(images)
    tokens = model.config.vocab_size - 1 - torch.arange(24)
    return model(input_ids=tokens.reshape(3, 8)).logits.square().mean()


def with_values(model: nn.Module) -> nn.Module:
    """Fill the parameters with numbers other than 0, which weight decay moves."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


# ---- what moves


def train(model: nn.Module, policy: gp.Freeze, steps: int, *, after_step=lambda: None, **options) -> Moves:
    """Return which entries each step moves, under an optimizer that moves all that are not frozen."""
    moves = []
    plain = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    with gp.training(model, plain, [policy], seed=0, **options) as optimizer:
        for _ in range(steps):
            moves.append(step(model, optimizer))
            after_step()
    return moves


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: parameter.detach() != before[name] for name, parameter in model.named_parameters()}


def whole(moved: dict[str, Tensor]) -> set[str]:
    """Return the tensors that have moved; none may have moved in part."""
    assert all(each.all() or not each.any() for each in moved.values())
    return {name for name, each in moved.items() if each.all()}


def named(model: nn.Module, *globs: str) -> set[str]:
    names = {name for name, _ in model.named_parameters()}
    return {name for name in names if any(fnmatchcase(name, glob) for glob in globs)}


def parts_of(model: nn.Module) -> list[set[str]]:
    """Return the parameters of a Llama's embedding, of each layer, and of norm and head."""
    layers = [[f"model.layers.{number}.*"] for number in range(len(model.model.layers))]
    return [named(model, *globs) for globs in (EMBEDDING, *layers, HEAD)]


def new_rows(policy):
    model = with_values(llama(1, vocabulary=50260))
    for moved in train(model, policy, 2):
        rows = moved.pop("model.embed_tokens.weight")
        assert rows[50257:].all()
        assert not rows[:50257].any()
        assert whole(moved) == set()


def only(*globs, model=Parts, steps=2, after=None):
    """Check that what the globs match moves, and nothing else; after ``after`` steps everything."""

    def check(policy):
        made = with_values(model())
        for count, moved in enumerate(train(made, policy, steps)):
            assert whole(moved) == named(made, *(globs if after is None or count < after else "*"))

    return check


def two_layers(policy):
    model = with_values(llama(3))
    embedding, *layers, head = parts_of(model)
    drawn = []
    for count, moved in enumerate(train(model, policy, 60)):
        if count % 20 == 0:
            drawn.append([number for number, layer in enumerate(layers) if layer <= whole(moved)])
        assert whole(moved) == embedding.union(head, *(layers[number] for number in drawn[-1]))
    assert all(len(each) == 2 for each in drawn)
    assert len(set(map(tuple, drawn))) > 1


def layer_by_layer(policy):
    model = with_values(llama(1))
    parts = parts_of(model)
    for count, moved in enumerate(train(model, policy, 160)):
        assert whole(moved) == parts[count // 50 % 3]


def from_the_last(policy):
    model = with_values(llama())
    parts = parts_of(model)
    for count, moved in enumerate(train(model, policy, 14, steps_per_epoch=2)):
        assert whole(moved) == set().union(*parts[-(count // 2 + 1) :])


def head_first(policy):
    model = with_values(Parts())
    losses = iter([3.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    moves = train(model, policy, 6, after_step=lambda: policy.mask.report({"val/loss": next(losses)}))
    assert list(map(whole, moves)) == [named(model, "head.*")] * 5 + [named(model, "*")]


def random_tenth(policy):
    model = with_values(llama())
    first, *others = train(model, policy, 4)
    moved = torch.cat([each.flatten() for each in first.values()])
    assert abs(moved.float().mean() - 0.1) < 0.01
    assert all(first[name].equal(each) for other in others for name, each in other.items())


def largest_gradients(policy):
    model = with_values(llama(1))
    waiting, *others = train(model, policy, 102)
    assert whole(waiting) == set()
    loss(with_values(model)).backward()
    gradients = {name: parameter.grad.abs() for name, parameter in model.named_parameters()}
    flat = torch.cat([each.flatten() for each in gradients.values()])
    least = flat.sort(descending=True).values[round(0.1 * len(flat)) - 1]
    for moved in others[:99]:
        assert all(moved[name].equal(each >= least) for name, each in gradients.items())
    assert sum(each.sum() for each in others[-1].values()) == round(0.1 * len(flat))
    assert not all(others[-1][name].equal(each) for name, each in others[0].items())


def tenth_of_each_weight(policy):
    model = with_values(Parts())
    places = []

    def look() -> None:
        places.append({name: p.detach() != 0 for name, p in model.named_parameters() if p.ndim > 1})
        for each in places[-1].values():
            assert abs(each.sum() - 0.1 * each.numel()) <= 1

    moves = train(model, policy, 102, after_step=look)
    for moved, nonzero in list(zip(moves, places, strict=True))[1:99]:
        assert all(
            moved[name].equal(nonzero.get(name, torch.ones(()).bool().expand_as(each)))
            for name, each in moved.items()
        )
    assert any(not places[-1][name].equal(each) for name, each in places[0].items())


def zeros_stay(policy):
    model = with_values(llama())
    kept = {
        name: torch.rand_like(p) < 0.5 if p.ndim > 1 else torch.ones_like(p).bool()
        for name, p in model.named_parameters()
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(kept[name])
    for moved in train(model, policy, 2):
        assert all(each.equal(kept[name]) for name, each in moved.items())


def rates(factor=lambda name: 1.0, decay=lambda name: 0.5, model=Parts):
    """Check one step of SGD, whose rate and weight decay each parameter has as its name says."""

    def check(policy):
        made = with_values(model())
        before, lr = copy.deepcopy(dict(made.named_parameters())), 1e-2
        loss(made).backward()
        plain = torch.optim.SGD(made.parameters(), lr=lr, weight_decay=0.5)
        with gp.training(made, plain, [policy]) as optimizer:
            optimizer.step()
        for name, parameter in made.named_parameters():
            gradient = parameter.grad + decay(name) * before[name]
            torch.testing.assert_close(parameter, before[name] - lr * factor(name) * gradient, msg=name)

    return check


def llama_decay(name: str) -> float:
    layer = re.search(r"layers\.(\d)", name)
    return 0.75 ** (4 - int(layer[1]) if layer else 5 if "embed" in name else 0)


def own_mask(code):
    model = with_values(Parts())
    mask = torch.rand(4, 6) < 0.5
    names = {"gp": gp, "optimizer": torch.optim.AdamW(model.parameters()), "weight": model.head.weight}
    exec(code, names | (made := {"mask": mask}), made)
    moved = step(model, made["optimizer"])
    assert moved.pop("head.weight").equal(mask)
    assert whole(moved) == named(model, "*") - {"head.weight"}


def planned(code):
    model, policies = with_values(llama()), {"rows": gp.Train(gp.masks.Rows("30:"), params="*embed*")}
    plan = eval(code, {"gp": gp, "model": model, "policies": policies, "step": loss})
    (moved,) = train(model, policies["rows"], 1)
    assert plan.layers.training == sum(int(each.sum()) for each in moved.values()) == 80
    assert [row.name for row in plan.layers if row.training] == ["model.embed_tokens"]


# ---- gradients


class GuidedReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(min=0) * (ctx.saved_tensors[0] > 0)


def scaled(factor: float, forward=lambda x: x):
    """Return a function whose gradient is that of the identity times a factor."""
    return lambda x: factor * x + (forward(x) - factor * x).detach()


def clipped(x: Tensor) -> Tensor:
    x = x * 1.0
    x.register_hook(lambda grad: grad / grad.norm().clamp(min=1))
    return x


def gradients(**reference):
    """Check the gradient of every parameter against that of the model with these functions in it."""

    def check(policy):
        torch.manual_seed(0)
        model, plain, wanted = Parts(), Parts(), Parts(**reference)
        for other in (plain, wanted):
            other.load_state_dict(model.state_dict())
        loss(plain).backward()
        (20 * loss(wanted)).backward()
        if isinstance(policy, gp.policies.Policy):
            with gp.install(model, [policy], strict=True):
                output = loss(model)
        else:
            with policy:
                output = loss(model)
        (20 * output).backward()
        torch.testing.assert_close(gradients_of(model), gradients_of(wanted))
        assert any(
            p.grad is None or not torch.allclose(p.grad, 20 * q.grad)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        )

    return check


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def without_nan(policy):
    """Check that what `where` leaves out gets no gradient, where without the rule it is NaN."""
    model, x = nn.Module(), torch.tensor([-1.0, 0.0, 4.0], requires_grad=True)
    model.forward = lambda x: torch.where(x > 0, torch.sqrt(x), 0.0).sum()
    assert torch.autograd.grad(model(x), x)[0][:2].isnan().all()
    with gp.install(model, [policy], strict=True):
        model(x).backward()
    assert x.grad.tolist() == [0.0, 0.0, 0.25]


CASES = {
    "train only the embedding rows of new tokens": new_rows,
    "train only biases and the head (BitFit)": only("*.bias", "lm_head.*", model=llama),
    "freeze a part of the model": only("[!e]*"),
    "freeze it for 1000 steps": only("[!e]*", steps=1002, after=1000),
    "two layers at a time, embeddings and head always (LISA)": two_layers,
    "one layer at a time, in cycles (BAdam)": layer_by_layer,
    "unfreeze from the last layer to the first (ULMFiT)": from_the_last,
    "train the head until a metric stops improving, then everything": head_first,
    "a random tenth of all entries, the same throughout": random_tenth,
    "the tenth with the largest gradients, chosen every 100 steps": largest_gradients,
    "keep 90 % of each weight matrix at 0, in changing places (RigL)": tenth_of_each_weight,
    "keep the zeros of a pruned checkpoint": zeros_stay,
    "layer-wise learning-rate decay": rates(llama_decay, model=llama),
    "a tenth of the learning rate for a part": rates(lambda name: 0.1 if name.startswith("encoder") else 1.0),
    "no weight decay for biases": rates(decay=lambda name: 0.0 if name.endswith(".bias") else 0.5),
    "a gradient through `round`": gradients(rounding=scaled(1.0, torch.round)),
    "a probe that does not train the layers before it": gradients(probe=Tensor.detach),
    "domain-adversarial training": gradients(domain_head=scaled(-1.0)),
    "clip the gradient at one place": gradients(decoder=clipped),
    "no NaN from `where(x > 0, sqrt(x), 0)`": without_nan,
    "guided backpropagation, however ReLU is spelled": gradients(relu=[GuidedReference.apply] * 3),
    "your own gradient for an operation": gradients(rounding=scaled(3.0, torch.round)),
    "a mask that you set yourself": own_mask,
    "see what policies affect, before training": planned,
}


@pytest.mark.filterwarnings("ignore:policy .*freezing stops parameters, not buffers:UserWarning")
@pytest.mark.parametrize(("text", "code"), recipes())
def test_a_recipe_does_what_its_row_says(text, code):
    check = CASES[text]
    if check in (own_mask, planned):
        check(code)
        return
    block = re.fullmatch(r"with (.+): …", code)
    check(eval(block[1] if block else code, {"gp": gp, "my_rule": lambda grad, inputs, output: 3 * grad}))


def test_every_case_is_a_row():
    assert {case.values[0] for case in recipes()} == set(CASES)
