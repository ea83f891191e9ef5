"""Operations that are named and never met are told when the block ends."""

import sys
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


def test_blocks_that_met_what_they_name_or_where_nothing_could_be_met_say_nothing(x, told):
    def blocks():
        with gp.gradient_override({"round": "identity"}):
            torch.round(x)
        with gp.gradient_override({"round": "identity"}):
            pass
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

    @gp.gradient_override({"floor": "identity"})
    def generated(x):
        yield torch.ceil(x)
        yield torch.floor(x)

    def calls():
        quantised(x)
        quantised(x)
        # Its second step meets what the first did not.
        list(generated(x))

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
