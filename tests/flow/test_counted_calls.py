"""One call of an operation or a module, by its number within a forward (``calls=``)."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradpolicy as gp


class Sums(nn.Module):
    """Three additions in different spellings, so that each factor of the gradient tells its call."""

    def forward(self, x):
        return torch.cat([x + 1, torch.add(x, 2), x.add(3)])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Sums(), Sums()

    def forward(self, x):
        return torch.cat([self.first(x), self.second(x), x + 4])


def five_times(**where):
    return gp.Scale(5.0, **where)


def factors(call, count):
    """The gradient that each of the results passes to the one input."""
    x = torch.ones(1, requires_grad=True)
    for index in range(count):
        call(x)[index].backward()
        yield x.grad.item()
        x.grad = None


@pytest.mark.parametrize(
    ("model", "where", "expected"),
    [
        (Sums(), {"calls": 1}, [1, 5, 1]),
        (Sums(), {"calls": [0, 2]}, [5, 1, 5]),
        (Model(), {"calls": 6}, [1, 1, 1, 1, 1, 1, 5]),
        # Each matched module counts its own, and a call counts for the innermost.
        (Model(), {"modules": ["first", "second"], "calls": 0}, [5, 1, 1, 5, 1, 1, 1]),
        (Model(), {"modules": "second", "calls": 0}, [1, 1, 1, 5, 1, 1, 1]),
        (Model(), {"modules": ["*"], "calls": [0]}, [5, 1, 1, 5, 1, 1, 5]),
    ],
)
def test_calls_by_number(model, where, expected):
    with gp.install(model, [five_times(ops=["add"], **where)]) as installed:
        assert list(factors(model, len(expected))) == expected
        assert installed.report().rows[0].matched["add"] == len(expected) * expected.count(5)


def test_an_inactive_policy_counts_nothing():
    with gp.install(model := Sums(), {"half": five_times(ops=["add"], calls=[7])}) as installed:
        installed.set_active("half", False)
        assert list(factors(model, 3)) == [1, 1, 1]


def test_two_policies_on_different_calls():
    policies = [five_times(ops=["add"], calls=[0]), gp.UseRule("stop", ops=["add"], calls=[2])]
    with gp.install(model := Sums(), policies):
        assert list(factors(model, 3)) == [5, 1, 0]
    with pytest.raises(gp.PolicyError, match="both have a rule for operation 'add'"):
        gp.install(model, [policies[0], gp.Reverse(ops=["add"], calls=[0, 1])])


@pytest.mark.parametrize(
    ("model", "where", "message"),
    [
        (Model(), {"ops": ["sub"]}, "'sub' ran 0 times in the forward of .*, so there is no call 2"),
        (Model(), {"ops": ["sub"], "modules": ["first"]}, "'sub' ran 0 times in the forward of .* no call 2"),
        (
            nn.Sequential(nn.ReLU()),
            {"ops": "relu", "modules": "0"},
            "'relu' ran once in the forward of module '0'",
        ),
    ],
)
def test_fewer_calls_are_an_error(model, where, message):
    with (
        pytest.raises(gp.PolicyError, match=f"'scale': .*{message}"),
        gp.install(model, [five_times(calls=2, **where)]),
    ):
        model(torch.ones(1, 2))


def test_compiled_code_counts_too(compiled):
    weights, x = torch.arange(1.0, 8.0), torch.ones(1, requires_grad=True)
    for model in (Model(), Sums()):
        modules = ["first", "second"] if isinstance(model, Model) else None
        with gp.install(model, [five_times(ops=["add"], modules=modules, calls=[1])]):
            loss = lambda run: (run(x) * weights[: 7 if modules else 3]).sum()  # noqa: B023, E731
            expected, found = (torch.autograd.grad(loss(run), x) for run in (model, compiled(model)))
            assert found == expected


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_counted_calls_in_checkpoints(use_reentrant, as_module):
    run = functools.partial(checkpoint, use_reentrant=use_reentrant)
    policy = gp.UseRule(lambda g, i, o: 5.0 * g * (i[0] == i[0]), ops=["add"], calls=[1])
    with gp.install(model := Sums(), [policy]):
        assert list(factors(lambda x: run(model, x), 3)) == [1, 5, 1]
    part, x = Sums(), torch.ones(1, 2, requires_grad=True)
    with (
        gp.install(model := as_module(lambda x: run(part, x)), [policy]),
        pytest.raises(gp.PolicyError, match="'add' runs in a checkpointed function"),
    ):
        model(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: five_times(ops="add", calls=-1), r"Scale\.calls: expected integers of at least 0, got -1"),
        (lambda: five_times(ops="add", calls=["1"]), r"calls: expected integers of at least 0, got '1'"),
        (lambda: five_times(modules="a", calls=1), r"calls: goes with ops="),
    ],
)
def test_wrong_numbers_are_refused(make, message):
    with pytest.raises(gp.PolicyError, match=message):
        make()
