"""Operations that are named and never met are told when the block ends."""

import re
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import gradpolicy as gp


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Forgets code that other tests have compiled: it may meet operations unseen, and nothing is told."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def x():
    return torch.randn(4, requires_grad=True)


@pytest.fixture
def told():
    """Runs a function and gives the texts of its warnings."""

    def of(function):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
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


def test_a_block_names_what_ran_near_the_operation_that_was_never_met(x, told):
    def block():
        with gp.gradient_override({"heaviside": "identity"}):
            torch.where(x < 0, x, (x > 0) * x)

    (message,) = told(block)
    assert "'heaviside' was never met" in message
    assert all(f"'{near}'" in message for near in ("gt", "lt", "where"))


def test_whole_numbers_are_near_a_rounding(x, told):
    def block():
        with gp.gradient_override({"round": "identity"}):
            x.long()

    (message,) = told(block)
    assert "'long'" in message


def test_a_strict_block_raises(x):
    with (
        pytest.raises(gp.PolicyError, match="'heaviside' was never met; near it, 'gt'"),
        gp.gradient_override({"heaviside": "identity"}, strict=True),
    ):
        x > 0  # noqa: B015


def test_what_ran_only_without_gradient_is_not_met(x, told):
    def block():
        with gp.gradient_override({"bernoulli": "bernoulli"}), torch.no_grad():
            torch.distributions.Bernoulli(torch.sigmoid(x)).sample()

    (message,) = told(block)
    assert "'bernoulli' ran only where no gradient is recorded" in message


def test_blocks_that_met_what_they_name_or_that_record_no_gradient_say_nothing(x, told):
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

    assert told(blocks) == []


@pytest.mark.parametrize("strict", [False, True])
def test_nothing_is_said_while_an_exception_leaves_the_block(x, told, strict):
    def fails(model):
        with (
            gp.install(model, [gp.Guided()], strict=strict),
            gp.gradient_override({"floor": "identity"}, strict=strict),
        ):
            model(x)
            raise KeyError("own")

    def block():
        with pytest.raises(KeyError, match="own"):
            fails(Steps())

    assert told(block) == []


def test_a_decorated_function_is_named_and_told_of_once(x, told):
    @gp.gradient_override({"round": "identity"})
    def quantised(x):
        return torch.floor(x)

    def calls():
        quantised(x)
        quantised(x)

    (message,) = told(calls)
    assert "gradient_override of 'quantised': operation 'round'" in message


def test_an_installation_says_so_when_it_is_removed(x, told):
    def remove():
        installed = gp.install(Steps(), {"step": gp.UseRule("identity", ops="heaviside")})
        installed.model(x)
        installed.remove()
        installed.remove()

    (message,) = told(remove)
    assert message.startswith("policy 'step': operation 'heaviside' was never met; near it, 'gt'")


def test_each_operation_that_is_named_counts_and_one_of_the_usual_ones_is_enough(x, told):
    def install(policy):
        with gp.install(model := Steps(), [policy]):
            model(x).sum().backward()

    assert told(lambda: install(gp.StraightThrough())) == []
    (message,) = told(lambda: install(gp.StraightThrough(ops=["round", "ceil"])))
    assert "'ceil' was never met" in message


def test_a_strict_installation_raises_after_it_has_come_off(x):
    model = Steps()
    message = "policy 'guided': operation 'relu'"
    with pytest.raises(gp.PolicyError, match=message), gp.install(model, [gp.Guided()], strict=True):
        model(x)
    assert "forward" not in model.__dict__
    installed = gp.install(model, [gp.Guided()], strict=True)
    model(x)
    with pytest.raises(gp.PolicyError, match=message):
        installed.remove()


def test_a_model_that_never_ran_and_a_policy_that_was_never_active_say_nothing(x, told):
    def quiet():
        with gp.install(Steps(), [gp.Guided()]):
            pass
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

    assert told(quiet) == []


def test_a_model_that_ran_only_without_gradients_is_told_of_exactly_that(x, told):
    def evaluate():
        with gp.install(model := Steps(), [gp.StraightThrough()]), torch.no_grad():
            model(x)

    (message,) = told(evaluate)
    assert "'round' ran only where no gradient is recorded" in message


def test_what_compiled_code_met_is_not_taken_for_unmet(x, told):
    torch._dynamo.reset()
    compiled = torch.compile(torch.round, backend="eager")

    def blocks():
        for _ in range(2):
            with gp.gradient_override({"round": "identity"}):
                (2 * compiled(x)).sum()

    try:
        assert told(blocks) == []
    finally:
        torch._dynamo.reset()


def test_a_compiled_model_is_told_of_what_it_never_met(told):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")

    def run(policy):
        with gp.install(model, [policy]):
            compiled(torch.ones(1, 4)).sum().backward()

    try:
        assert told(lambda: run(gp.Guided())) == []
        assert "never met" in told(lambda: run(gp.StraightThrough()))[-1]
    finally:
        torch._dynamo.reset()


def test_what_ran_while_its_policy_was_off_is_listed_and_not_told_of(x, told):
    class Sometimes(nn.Module):
        def forward(self, x, steps):
            return torch.round(x) if steps else torch.floor(x)

    def run():
        policy = gp.StraightThrough(ops="round", when=gp.When(start=1))
        with gp.install(model := Sometimes(), [policy]) as installed:
            model(x, steps=False)
            installed.update(step=0)
            model(x, steps=True)
            (row,) = installed.report().rows
            assert row.operations_met == {"round", "floor"}
            assert row.matched == {}

    assert told(run) == []


def test_where_nothing_ran_it_is_said_so(x, told):
    def run():
        with gp.install(model := nn.Identity(), [gp.StraightThrough(ops="round")]):
            model(x)

    (message,) = told(run)
    assert message.endswith("'round' was never met; nothing ran there that a rule could be put on")


def test_the_table_counts_what_passed_at_a_boundary(x):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with gp.install(
        model, {"slow": gp.Scale(0.5, modules="1"), "rest": gp.Scale(0.5, params="0.*")}
    ) as installed:
        model(x)
        slow, rest = (str(installed.report()).splitlines()[line].split("│") for line in (4, 5))
    assert [cell.strip() for cell in slow[1:7]] == ["slow", "Scale", "input of modules 1", "yes", "1", "1"]
    assert [cell.strip() for cell in rest[5:8]] == ["–", "–", "2"]


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_relu_on_what_needs_no_gradient_is_told_of(needs_gradient, told):
    def run():
        with gp.install(model := nn.Sequential(nn.ReLU()), [gp.Guided()]):
            model(torch.ones(2, requires_grad=needs_gradient))

    assert len(told(run)) == (not needs_gradient)


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


class Handed(nn.Module):
    """Calls a function in a module's place."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Generates(nn.Module):
    def forward(self, x):
        yield torch.relu(2 * x)


class Consumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.many = Generates()

    def forward(self, x):
        return sum(self.many(x))


def _scripted(make):
    return nn.Sequential(nn.Linear(4, 4), make(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))


def _frozen_trunk():
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    return model


def _shared():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    model.add_module("tied", nn.Linear(4, 4))
    model.tied.weight = layer.weight
    return model


def _run(model, x):
    model(x).sum().backward()


def _encode(model, x):
    model.encode(x).sum().backward()


def _in_thread(model, x):
    results = []
    thread = threading.Thread(target=lambda: results.append(torch.relu(x * model.first.weight)))
    thread.start()
    thread.join()
    results[0].sum().backward()


class RunBefore:
    """Runs the model before the block, so that only the backward pass is in it."""

    def __call__(self, model, x):
        self.loss.backward()


# Where nothing can act: the model, what runs in the block, whether the input needs a gradient, the policies,
# and what is said.
NOWHERE = {
    "in a ScriptModule": (
        lambda: _scripted(torch.jit.script),
        _run,
        True,
        [
            gp.Scale(0.5, modules="1.0"),
            gp.Stop("zero", modules="1.0"),
            gp.StraightThrough(modules="1.0"),
            gp.Guided(),
        ],
        r"cannot see into ScriptModule '1'",
    ),
    "in a traced module": (
        lambda: _scripted(lambda inner: torch.jit.trace(inner, torch.ones(1, 4))),
        _run,
        True,
        [gp.Scale(0.5, modules="1.0"), gp.Clip(norm=1.0, modules="1.0", at="output"), gp.Guided(modules="1")],
        r"cannot see into ScriptModule '1'",
    ),
    "data": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        _run,
        False,
        [gp.Scale(0.5, modules="0"), gp.Stop(modules="0"), gp.StraightThrough(modules="0", inside="own")],
        r"no gradient crosses (input of )?module '0'",
    ),
    "one argument of several is data": (
        lambda: nn.Bilinear(4, 4, 4),
        lambda model, x: model(x, torch.ones(4, 4)).sum().backward(),
        True,
        [gp.Scale(0.5, modules="*", argument="input2"), gp.Stop(modules="*", argument=1)],
        r"no gradient crosses input of module ''",
    ),
    "one of two that are named": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        _run,
        False,
        [gp.Scale(0.5, modules=["0", "1"])],
        r"no gradient crosses input of module '0':",
    ),
    "behind a frozen trunk": (
        _frozen_trunk,
        _run,
        False,
        [gp.Scale(0.5, modules="1"), gp.Stop(modules="1"), gp.Reverse(modules="0", at="output")],
        r"no gradient crosses (input of module '1'|output of module '0')",
    ),
    "a frozen parameter": (
        _frozen_trunk,
        _run,
        False,
        [gp.Scale(0.5, params="0.weight"), gp.Stop("zero", params=["0.weight", "1.bias"])],
        r"no gradient came to parameter '0.weight'",
    ),
    "under no_grad": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        lambda model, x: torch.no_grad()(model)(x),
        True,
        [gp.Scale(0.5, modules="1"), gp.StraightThrough(modules="1"), gp.Stop(modules="1", at="output")],
        r"no gradient crosses .*module '1'",
    ),
    "bypassed": (
        Bypassed,
        _run,
        True,
        [
            gp.Scale(0.5, modules="second"),
            gp.Stop(modules="second", at="output"),
            gp.StraightThrough(modules="second"),
            gp.Clip(norm=1.0, modules=["first", "second"]),
            gp.Scale(0.5, modules="second", calls=[1]),
            gp.Scale(0.5, modules=nn.Linear),
        ],
        r"module 'second' never ran through its forward",
    ),
    "bypassed, with a rule on operations": (
        lambda: nn.ModuleDict({"used": Handed(torch.relu), "not": Handed(torch.relu)}),
        lambda model, x: model["used"](x).sum().backward(),
        True,
        [gp.Guided(modules=["used", "not"])],
        r"module 'not' never ran through its forward",
    ),
    "entered by another method": (
        Bypassed,
        _encode,
        True,
        [gp.Scale(0.5, modules="*"), gp.Guided(), gp.StraightThrough(modules="second")],
        r"the model never ran while the policies were on it",
    ),
    "in another thread": (
        Bypassed,
        _in_thread,
        True,
        [gp.Scale(0.5, modules="first"), gp.Guided()],
        r"the model never ran while the policies were on it",
    ),
    "a block round backward only": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        RunBefore(),
        True,
        [gp.Scale(0.5, modules="1"), gp.Guided(), gp.StraightThrough(modules="1")],
        r"the model never ran while the policies were on it",
    ),
    "a generator": (
        Consumes,
        _run,
        True,
        [gp.Scale(0.5, modules="many", at="output"), gp.Guided(modules="many")],
        r"cannot see into (the )?generator (that module|at output of module) 'many'",
    ),
    "one of two names": (
        _shared,
        _run,
        True,
        [
            gp.Scale(0.5, modules="2"),
            gp.StraightThrough(modules="2"),
            gp.UseRule("identity", ops="linear", argument="input", modules="2"),
        ],
        r"module '2' is also '0'",
    ),
    "one of two names of a parameter": (
        _shared,
        lambda model, x: (model(x) + model.tied(x)).sum().backward(),
        True,
        [gp.Scale(0.5, params="tied.weight")],
        r"parameter 'tied.weight' is also '0.weight'",
    ),
}
CASES = [(kind, number) for kind, (*_, policies, _) in NOWHERE.items() for number in range(len(policies))]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("kind", "number"), CASES)
def test_where_nothing_can_act_there_is_a_warning_and_an_error_if_strict(kind, number, told):
    make, run, needs_gradient, policies, message = NOWHERE[kind]

    def block(strict):
        model, x = make(), torch.randn(4, 4, requires_grad=needs_gradient)
        if isinstance(run, RunBefore):
            run.loss = model(x).sum()
        with gp.install(model, {"it": policies[number]}, strict=strict):
            run(model, x)

    warned = [text for text in told(lambda: block(strict=False)) if "policy" in text]
    assert any(re.search(rf"policy 'it'.*{message}", text) for text in warned), warned
    with pytest.raises(gp.PolicyError, match=rf"policy 'it'.*{message}"):
        told(lambda: block(strict=True))


# A plan runs a step itself, and there as it is meant. A policy on operations that met none is an error of it.
PLANNED = [
    (kind, number)
    for kind, number in CASES
    if NOWHERE[kind][1] is _run and not (NOWHERE[kind][3][number].ops and kind != "one of two names")
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "number"), PLANNED)
def test_the_plan_says_so_beforehand(kind, number):
    make, _, needs_gradient, policies, message = NOWHERE[kind]
    x = torch.randn(4, 4, requires_grad=needs_gradient)
    planned = gp.plan(make(), {"it": policies[number]}, lambda model: model(x).sum())
    assert any(re.search(f"it: {message}", line) for line in planned.warnings), planned.warnings
    if not policies[number].params:
        assert planned.cuts == ()


@pytest.mark.filterwarnings("ignore")
def test_the_plan_of_an_operation_within_a_traced_module_is_an_error():
    make, *_ = NOWHERE["in a traced module"]
    with pytest.raises(gp.PolicyError, match=r"it may run within \"ScriptModule '1'\""):
        gp.plan(make(), {"it": gp.Guided()}, lambda model: model(torch.ones(1, 4)).sum())


def test_blocks_in_which_everything_acted_say_nothing(x, told):
    x = torch.randn(4, 4, requires_grad=True)
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.add_module("layers", Handed(lambda x: layers[1](layers[0](x))))
    model.layers.parts = layers
    policies = {
        # Of what a glob or class matches one place is enough; a list of modules has no forward.
        "glob": gp.Clip(norm=1.0, modules="layers.parts*"),
        "class": gp.Scale(0.5, modules=nn.Linear),
        "parameters": gp.Scale(0.5, params="*"),
        "through": gp.StraightThrough(modules="1"),
        "later": gp.Stop(modules="1", when=gp.When(start=9)),
    }

    def run(strict):
        with gp.install(model, policies, strict=strict) as installed:
            installed.update()
            model(x.detach()).sum().backward()

    def only_looks():
        with gp.install(model, policies) as installed:
            installed.report()

    for strict in (False, True):
        assert told(lambda strict=strict: run(strict)) == []
    assert told(only_looks) == []


def test_a_strict_block_in_which_the_model_never_ran_raises(x):
    message = "policy 'guided': the model never ran"
    with pytest.raises(gp.PolicyError, match=message), gp.install(Steps(), [gp.Guided()], strict=True):
        pass


@pytest.mark.filterwarnings("ignore:.*cannot see into")
def test_a_strict_block_raises_for_what_it_cannot_see_into():
    lstm, x = nn.LSTM(2, 2), torch.randn(3, 1, 2, requires_grad=True)
    with (
        pytest.raises(gp.PolicyError, match="cannot see into lstm"),
        gp.gradient_override({"tanh": "identity"}, strict=True),
    ):
        lstm(torch.tanh(x))


@pytest.mark.filterwarnings("ignore:.*went through")
def test_a_strict_block_raises_for_a_gradient_that_was_lost(x):
    def counted(x):
        taken = x > 0
        return torch.bincount(taken.long()).sum() + (taken * x).sum()

    with (
        pytest.raises(gp.PolicyError, match="'gt' went through 'bincount', which lost its gradient"),
        gp.gradient_override({"gt": "identity"}, strict=True),
    ):
        counted(x)
