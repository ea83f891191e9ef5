"""Policies that act nowhere: a warning when the block ends, an error if strict, a line of the plan."""

import contextlib
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from functorch.experimental.control_flow import map as functorch_map
from torch import nn
from torch._higher_order_ops.scan import scan

import gradpolicy as gp

# No other test compiles a block with this rule: what such code has run counts for every block like it.
RARE = gp.get_rule("arctan", alpha=1.25)


@pytest.fixture
def x():
    return torch.randn(4, requires_grad=True)


@pytest.fixture
def warned():
    """Run a function and return the texts of its warnings."""

    def of(function):
        with warnings.catch_warnings(record=True, action="always") as caught:
            function()
        return [str(warning.message) for warning in caught]

    return of


class Steps(nn.Module):
    """A step that is written as a comparison, and a rounding."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.linear(x)
        return torch.round(hidden) * (hidden > 0)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("operation", "run", "message"),
    [
        (
            "heaviside",
            lambda x: torch.where(x < 0, x, (x > 0) * x),
            r"'heaviside' was never met; what ran there: 'gt', 'lt'.* 'where'",
        ),
        ("round", lambda x: x.long(), "what ran there: 'long'"),
        (
            "round",
            lambda x: torch.cat([x.exp().cumsum(0), x.sin()]).mean(),
            "ran there: 'cat', 'cumsum', 'exp', 'mean', 'sin'",
        ),
        ("relu", nn.ReLU6(), "did you mean 'relu6'"),
    ],
)
def test_block_names_what_ran(operation, run, message, strict, x, warned):
    block = gp.gradient_override({operation: RARE}, strict=strict)(run)
    if strict:
        with pytest.raises(gp.PolicyError, match=message):
            block(x)
    else:
        (text,) = warned(lambda: block(x))
        assert re.search(message, text)


def test_quiet_blocks(x, warned):
    def blocks():
        with gp.gradient_override({"round": "identity"}):
            torch.round(x)
        with torch.no_grad(), gp.gradient_override({"round": "identity"}):
            torch.floor(x)
        # The inner block takes it, which is how blocks nest.
        with gp.gradient_override({"round": "identity"}), gp.gradient_override({"round": "stop"}):
            torch.round(x)
        with gp.gradient_override({"round": "identity"}), gp.install(Steps(), [gp.StraightThrough()]) as one:
            one.model(x)

    assert warned(blocks) == []


@pytest.mark.parametrize("strict", [False, True])
def test_quiet_while_an_exception_propagates(x, warned, strict):
    def block():
        with (
            contextlib.suppress(KeyError),
            gp.install(model := Steps(), [gp.Guided()], strict=strict),
            gp.gradient_override({"floor": "identity"}, strict=strict),
        ):
            model(x)
            raise KeyError

    assert warned(block) == []


def test_decorated_function_warns_once(x, warned):
    @gp.gradient_override({"round": RARE})
    def quantised(x):
        return torch.floor(x)

    (message,) = warned(lambda: (quantised(x), quantised(x)))
    assert "gradient_override of 'quantised': operation 'round'" in message


def test_each_named_operation_counts(x, warned):
    def install(policy):
        with gp.install(model := Steps(), [policy]):
            model(x).sum().backward()

    assert warned(lambda: install(gp.StraightThrough())) == []
    (message,) = warned(lambda: install(gp.StraightThrough(ops=["round", "ceil"])))
    assert "'ceil' was never met" in message


def test_removing_warns_or_raises_if_strict(x, warned):
    def removed(strict=False):
        step = {"step": gp.UseRule("identity", ops="heaviside")}
        installed = gp.install(model := Steps(), step, strict=strict)
        model(x)
        with pytest.raises(gp.PolicyError, match=message) if strict else warnings.catch_warnings():
            installed.remove()
        installed.remove()
        assert "forward" not in model.__dict__

    message = "policy 'step': operation 'heaviside' was never met; what ran there: 'gt'"
    (text,) = warned(removed)
    assert text.startswith(message)
    removed(strict=True)


def test_quiet_without_a_chance_to_act(x, warned):
    def quiet():
        with gp.install(Steps(), [gp.Guided()]) as installed:
            installed.report()
        with gp.install(model := Steps(), [gp.Guided(when=gp.When(phases="test"))]) as installed:
            installed.update(phase="fit")
            model(x)
        # It may get a gradient in testing.
        policy = gp.StraightThrough(ops="round", when=gp.When(phases=("fit", "test")))
        with gp.install(model, [policy]), torch.no_grad():
            model(x)
        # The rounding ran while its policy was off: it is there.
        with gp.install(model, [gp.StraightThrough(ops="round", when=gp.When(stop=1))]) as installed:
            installed.update(step=1)
            model(x)
            (row,) = installed.report().rows
            assert "round" in row.operations_met
            assert row.matched == {}

    assert warned(quiet) == []


@pytest.mark.usefixtures("compiled")
def test_warnings_about_compiled_code(x, warned):
    rounded = torch.compile(torch.round, backend="eager")
    compiled = torch.compile(model := nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")

    def blocks():
        for _ in range(2):
            with gp.gradient_override({"round": "identity"}):
                (2 * rounded(x)).sum()

    def run(policy):
        with gp.install(model, [policy]):
            compiled(torch.ones(1, 4)).sum().backward()

    assert warned(blocks) == []
    assert warned(lambda: run(gp.Guided())) == []
    assert "never met" in warned(lambda: run(gp.StraightThrough()))[-1]


class Bypassed(nn.Module):
    """A layer whose weight is used without its forward, and one that is entered by another method."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(nn.functional.linear(self.first(x), self.second.weight))

    def encode(self, x):
        return torch.relu(nn.functional.linear(x, self.second.weight))


class Generates(nn.Module):
    def forward(self, x):
        yield torch.relu(2 * x)


class Consumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.many = Generates()

    def forward(self, x):
        return sum(self.many(x))


def _plain():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def _scripted():
    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(_plain()))


def _frozen_trunk():
    return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))


def _run(model, x):
    model(x).sum().backward()


# Where nothing can act: the model, what runs in the block, the policies, and what is said.
NOWHERE = {
    "in a ScriptModule": (
        _scripted,
        _run,
        [gp.Scale(0.5, modules="1.0"), gp.StraightThrough(modules="1.0"), gp.Guided()],
        r"cannot see into ScriptModule '1'",
    ),
    "data": (
        _plain,
        lambda model, x: _run(model, x.detach()),
        [gp.Scale(0.5, modules="0"), gp.Stop(modules="0"), gp.StraightThrough(modules="0", inside="own")],
        r"no gradient crosses (input of )?module '0'",
    ),
    "one argument of several is data": (
        lambda: nn.Bilinear(4, 4, 4),
        lambda model, x: model(x, torch.ones(4, 4)).sum().backward(),
        [gp.Scale(0.5, modules="*", argument="input2"), gp.Stop(modules="*", argument=1)],
        r"no gradient crosses input of module ''",
    ),
    "a frozen parameter": (
        _frozen_trunk,
        lambda model, x: _run(model, x.detach()),
        [gp.Scale(0.5, params="0.weight"), gp.Stop("zero", params=["0.weight", "1.bias"])],
        r"no gradient came to parameter '0.weight'",
    ),
    "under no_grad": (
        _plain,
        lambda model, x: torch.no_grad()(model)(x),
        [gp.Scale(0.5, modules="1"), gp.StraightThrough(modules="1"), gp.Stop(modules="1", at="output")],
        r"no gradient crosses .*module '1'",
    ),
    "bypassed": (
        Bypassed,
        _run,
        [
            gp.Stop(modules="second", at="output"),
            gp.StraightThrough(modules="second"),
            gp.Clip(norm=1.0, modules=["first", "second"]),
            gp.Scale(0.5, modules=nn.Linear),
        ],
        r"module 'second' never ran through its forward",
    ),
    "one bypassed, and data in the other": (
        Bypassed,
        lambda model, x: _run(model, x.detach()),
        [gp.Scale(0.5, modules=["first", "second"])],
        r"module 'second' never ran .*; no gradient crosses input of module 'first'",
    ),
    "entered by another method": (
        Bypassed,
        lambda model, x: model.encode(x).sum().backward(),
        [gp.Scale(0.5, modules="*"), gp.Guided(), gp.StraightThrough(modules="second")],
        r"the model never ran while the policies were on it",
    ),
    "a generator": (
        Consumes,
        _run,
        [gp.Scale(0.5, modules="many", at="output")],
        r"cannot see into generator at output of module 'many'",
    ),
}
CASES = [(kind, number) for kind, (*_, policies, _) in NOWHERE.items() for number in range(len(policies))]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("kind", "number"), CASES)
def test_warns_where_nothing_can_act(kind, number, warned):
    make, run, policies, message = NOWHERE[kind]

    def block(strict):
        model, x = make(), torch.randn(4, 4, requires_grad=True)
        with gp.install(model, {"it": policies[number]}, strict=strict):
            run(model, x)

    texts = [text for text in warned(lambda: block(strict=False)) if "policy" in text]
    assert any(re.search(rf"policy 'it'.*{message}", text) for text in texts), texts
    with pytest.raises(gp.PolicyError, match=rf"policy 'it'.*{message}"):
        warned(lambda: block(strict=True))


# The cases that a plan knows beforehand, and whether the input of its step needs a gradient.
PLANNED = {
    **dict.fromkeys(["in a ScriptModule", "bypassed"], True),
    **dict.fromkeys(["data", "a frozen parameter"], False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "number"),
    [(kind, n) for kind, n in CASES if kind in PLANNED and not isinstance(NOWHERE[kind][2][n], gp.Guided)],
)
def test_the_plan_says_so_beforehand(kind, number):
    make, _, policies, message = NOWHERE[kind]
    x = torch.randn(4, 4, requires_grad=PLANNED[kind])
    planned = gp.plan(make(), {"it": policies[number]}, lambda model: model(x).sum())
    assert any(re.search(f"it: {message}", line) for line in planned.warnings), planned.warnings
    if not policies[number].params:
        assert planned.cuts == ()


@pytest.mark.parametrize("strict", [False, True])
def test_quiet_where_everything_acted(strict, warned, as_module):
    x, layers = torch.randn(4, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.add_module("layers", as_module(lambda x: layers[1](layers[0](x))))
    model.layers.parts = layers
    policies = {
        # Of what a glob or class matches one place is enough; a list of modules has no forward.
        "glob": gp.Clip(norm=1.0, modules="layers.parts*"),
        "class": gp.Scale(0.5, modules=nn.Linear),
        "parameters": gp.Scale(0.5, params="*"),
        "through": gp.StraightThrough(modules="1"),
        "later": gp.Stop(modules="1", when=gp.When(start=9)),
    }

    def run():
        with gp.install(model, policies, strict=strict) as installed:
            installed.update()
            model(x).sum().backward()

    assert warned(run) == []


class OwnSine(torch.autograd.Function):
    """A third party's function: torch's operation inside, and a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def _attend(x):
    query = F.scaled_dot_product_attention(*[torch.bmm(x[None, :, None], x[None, None])] * 3)[0]
    return nn.MultiheadAttention(4, 2)(query, query, query)[0]


# What hides an operation that is also called openly: the call, the operation and the name in the message.
OPAQUE = {
    "cond": (lambda x: torch.cond(x.sum() > 9, torch.cos, lambda v: torch.sin(v), (x,)), "sin", "cond"),
    "map": (lambda x: functorch_map(lambda v: torch.sin(v), x), "sin", "map"),
    "scan": (lambda x: scan(lambda c, v: (c + v, torch.sin(v)), torch.zeros(()), x)[1], "sin", "scan"),
    "an autograd.Function": (OwnSine.apply, "sin", "the autograd.Function of OwnSine.forward"),
    "attention in attention": (_attend, "scaled_dot_product_attention", "multi_head_attention_forward"),
    "bmm in attention": (_attend, "bmm", "scaled_dot_product_attention"),
    "log in a loss": (lambda x: F.gaussian_nll_loss(x, x.exp().log(), x.exp()), "log", "gaussian_nll_loss"),
    "sigmoid in a cell": (lambda x: nn.LSTMCell(4, 4)(torch.sigmoid(x))[0], "sigmoid", "lstm_cell"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OPAQUE)
def test_says_what_hides_an_operation_that_acts_elsewhere(kind, warned, as_module, x):
    call, operation, name = OPAQUE[kind]
    torch._dynamo.reset()
    model = as_module(lambda x: call(torch.sin(x)))
    policy = {"it": gp.Scale(5.0, ops=[operation])}
    message = rf"cannot see into {name}: it (may )?runs? {operation}.*\(modules=…, at='through'\)"

    def block(strict):
        with gp.install(model, policy, strict=strict):
            _run(model, x)

    assert any(re.search(f"policy 'it' {message}", text) for text in warned(lambda: block(strict=False)))
    with pytest.raises(gp.PolicyError, match=f"policy 'it': {message}"):
        block(strict=True)
    assert any(
        re.search(f"it: {message}", text) for text in gp.plan(model, policy, lambda m: m(x).sum()).warnings
    )
    with (
        pytest.raises(gp.PolicyError, match=message),
        gp.gradient_override({operation: "identity"}, strict=True),
    ):
        model(x)


def test_the_plan_names_what_may_be_a_relu_and_is_not_guided(as_module, x):
    model = as_module(lambda x: F.relu6(x) + torch.max(x, torch.zeros(4)) + x.clamp(min=0) + x.max())
    planned = gp.plan(model, [gp.Guided()], lambda copy: copy(x).sum())
    assert [line.split(" ran")[0] for line in planned.warnings] == ["guided: maximum", "guided: relu6"]
    assert planned.rows[0].operations == {"relu": 1}


def counted(x):
    taken = x > 0
    return torch.bincount(taken.long()).sum() + (taken * x).sum()


@pytest.mark.filterwarnings("ignore:.*(went through|cannot see into)")
@pytest.mark.parametrize(
    ("operation", "run", "message"),
    [
        ("gt", lambda x: (x > 0).any(), "'gt' never became floating-point there"),
        ("gt", counted, "'gt' went through 'bincount', which lost its gradient"),
        ("tanh", lambda x: nn.LSTM(4, 2)(torch.tanh(x)[None]), "cannot see into lstm"),
    ],
)
def test_strict_block_raises_for_lost_gradients(operation, run, message, x):
    with (
        pytest.raises(gp.PolicyError, match=message),
        gp.gradient_override({operation: "identity"}, strict=True),
    ):
        run(x)
