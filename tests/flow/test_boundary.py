"""Policies at the input and the output of a module, and at one argument of it."""

import dataclasses
import math
from collections import OrderedDict, deque, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gradpolicy as gp

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: torch.Tensor
    note: str = "kept"
    made: list = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self):
        assert not self.made, "a container is rebuilt without its constructor"
        self.made.append(1)


class PassOn(nn.Module):
    """Gives what it gets, and a parameter of its own beside it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, tree):
        return tree


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


CONTAINERS = {
    "tensor": (lambda x: x, lambda tree: tree),
    "tuple": (lambda x: (x, 1, None), lambda tree: tree[0]),
    "list": (lambda x: [x, "a"], lambda tree: tree[0]),
    "dict": (lambda x: {"x": x, "n": 2}, lambda tree: tree["x"]),
    "nested": (lambda x: {"x": [(x,)]}, lambda tree: tree["x"][0][0]),
    "named tuple": (lambda x: Pair(x, 3), lambda tree: tree.left),
    "ordered dict": (lambda x: OrderedDict(x=x), lambda tree: tree["x"]),
    "dataclass": (Frozen, lambda tree: tree.left),
    "dataclass that is a dict": (
        lambda x: pytest.importorskip("transformers.modeling_outputs").BaseModelOutput(x),
        lambda tree: (tree["last_hidden_state"] + tree.last_hidden_state) / 2,
    ),
}


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_boundary_acts_in_containers(kind, side, gradient):
    pack, unpack = CONTAINERS[kind]
    module = nn.ModuleDict({"part": PassOn()})
    module.forward = lambda x: unpack(module["part"](pack(x)))
    with gp.install(module, [gp.Scale(3.0, modules="part", at=side)]):
        result = module["part"](pack(torch.ones(3, requires_grad=True)))
        assert type(result) is type(pack(torch.ones(3)))
        found, value = gradient(module, torch.ones(3))
    assert torch.equal(found, torch.full((3,), 3.0))
    assert torch.equal(value, torch.ones(3))


def test_absolute_thresholds_follow_the_loss_scale(gradient):
    model, weights = PassOn(), torch.tensor([3.0, -0.2, 0.7])
    with gp.install(model, [gp.Clip(value=0.5, modules=PassOn)]) as installed:
        for scale in (1.0, 1024.0, torch.tensor(2.0**16)):
            installed.set_loss_scale(scale)
            found, _ = gradient(model, torch.ones(3), weights * scale)
            torch.testing.assert_close(found / scale, weights.clamp(-0.5, 0.5))


def signs(grad, inputs, output):
    return 0.25 * grad.sign()


@pytest.mark.parametrize(
    "policy",
    [
        gp.UseRule(signs, modules=PassOn),
        gp.UseRule(signs, modules=PassOn, at="through"),
        gp.UseRule(signs, ops="mul"),
        gp.UseRule(lambda own, inputs, output: [signs(own[0], (), None)], ops="mul", own=True),
        gp.UseRule(gp.Rule("signs", signs, gradient_filter=lambda grad: signs(grad, (), None)), ops="mul"),
    ],
)
def test_rules_of_ones_own_see_gradients_without_the_loss_scale(policy, gradient, as_module, run):
    model, weights = nn.Sequential(PassOn(), as_module(lambda x: 1.0 * x)), torch.tensor([3.0, -0.2, 0.7])
    with gp.install(model, [policy]) as installed:
        for scale in (1.0, 1024.0, torch.tensor(2.0**16)):
            installed.set_loss_scale(scale)
            found, _ = gradient(run(model), torch.ones(3), weights * scale)
            assert torch.equal(found / scale, 0.25 * weights.sign())


def test_fp16_gradients_keep_their_precision_without_the_loss_scale(gradient):
    seen, small = [], torch.full((3,), 2.0**-30)
    linear = gp.UseRule(lambda grad, inputs, output: seen.append(grad) or 3 * grad, modules=PassOn)
    with gp.install(model := PassOn(), [linear]) as installed:
        installed.set_loss_scale(2.0**16)
        found, _ = gradient(model, torch.ones(3).half(), (small * 2**16).half())
    assert torch.equal(seen[0], small)
    assert torch.equal(found, (3 * small * 2**16).half())


def test_policies_act_in_declared_order(gradient):
    model, weights = PassOn(), torch.tensor([3.0, 0.3, -2.0])
    clip, scale = gp.Clip(value=1.0, modules=PassOn), gp.Scale(2.0, modules=PassOn)
    for order, expected in (
        ([clip, scale], 2 * weights.clamp(-1, 1)),
        ([scale, clip], (2 * weights).clamp(-1, 1)),
    ):
        with gp.install(model, order):
            found, _ = gradient(model, torch.ones(3), weights)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("factor", "unit"),
    [
        (gp.schedules.Linear(0.0, 1.0, steps=10), "step"),
        (lambda epoch: 0.1 * epoch, "epoch"),
    ],
)
def test_schedule_in_the_unit_of_its_policy(factor, unit, gradient):
    model = PassOn()
    with gp.install(model, [gp.Reverse(factor, modules=PassOn, when=gp.When(unit=unit))]) as installed:
        for time in ({"step": 0, "epoch": 0}, {"step": 7, "epoch": 1}, {"step": 9, "epoch": 2}):
            installed.update(**time)
            found, _ = gradient(model, torch.ones(3))
            torch.testing.assert_close(found, torch.full((3,), -0.1 * time[unit]))


@pytest.mark.parametrize("value", [math.nan, "a", None])
def test_what_a_schedule_returns_is_checked_at_every_step(value):
    policy = gp.Scale(lambda step: 1.0 if step < 2 else value, modules=PassOn)
    with gp.install(PassOn(), {"half": policy}) as installed:
        installed.update(step=1)
        with pytest.raises(gp.PolicyError, match="policy 'half': factor at 2: expected a finite number, got"):
            installed.update(step=2)


@pytest.mark.parametrize("compiles", [False, True])
def test_backward_uses_the_number_of_its_forward(compiles, compiled):
    model, x = PassOn(), torch.ones(3, requires_grad=True)
    run = compiled(model, backend="eager") if compiles else model
    with gp.install(model, [gp.Scale(lambda step: 1.0 + step, modules=PassOn)]) as installed:
        results = []
        for step in range(3):
            installed.update(step=step)
            results.append(run(x))
    for step, result in enumerate(results):
        (found,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(found, torch.full((3,), 1.0 + step))


class Weighted(nn.Module):
    def forward(self, x, /, *more, weight, power=2, **others):
        return x * weight


@pytest.mark.parametrize("at", ["input", "output", "through"])
def test_rule_sees_other_arguments_by_name(at, compiled):
    seen = []

    def by_weight(grad, inputs, output, *, call):
        if not torch.compiler.is_compiling():
            seen.append(call)
        return grad * call.arguments["weight"]

    x, weight = torch.ones(2, requires_grad=True), torch.tensor([3.0, 5.0])
    with gp.install(model := Weighted(), [gp.UseRule(by_weight, modules=Weighted, at=at)]):
        for run in (model, compiled(model)) if at == "input" else (model,):
            (found,) = torch.autograd.grad(run(x, 7, weight=weight, mode="train").sum(), x)
            assert torch.equal(found, weight if at == "through" else weight**2)
    arguments = seen[0].arguments
    assert seen[0].operation == ("" if at == "through" else f"{at} of module ''")
    assert (arguments["more"], arguments["power"], arguments["mode"]) == ((7,), 2, "train")
    assert not arguments["x"].requires_grad


def test_passes_on_the_same_object_without_gradients():
    model = PassOn()
    given = {"labels": torch.tensor([1, 2]), "cache": [torch.ones(2)], "mode": "train"}
    with gp.install(model, [gp.Scale(2.0, modules=PassOn)]):
        assert model(given) is given


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        ([lambda x: SimpleNamespace(parts=[{"x": x}])], "SimpleNamespace"),
        ([lambda x: {"deep": (deque([x]), 1)}], "deque"),
        ([lambda x: (each for each in [x])], "generator"),
        ([Slots], "Slots"),
        ([lambda x: x, lambda x: SimpleNamespace(x=x)], "SimpleNamespace"),
    ],
)
def test_warns_of_tensors_in_other_objects(calls, name):
    model, x = PassOn(), torch.ones(2, requires_grad=True)
    with gp.install(model, {"double": gp.Scale(2.0, modules=PassOn)}) as installed:
        for call in calls[:-1]:
            model(call(x))
        with pytest.warns(UserWarning, match=f"'double' cannot see into {name} at input of"):
            model(calls[-1](x))
        assert list(installed.report().rows[0].opaque_calls) == [f"{name} at input of module ''"]
        model(calls[-1](x))


class Criterion(nn.Module):
    """A loss of two arguments, so that the gradient of each tells what its policy did."""

    def forward(self, p, z, *rest, weight=None):
        total = (p * z).sum() + sum((2 * tensor).sum() for tensor in rest)
        return total if weight is None else total + (3 * weight["value"]).sum()


def of_criterion(*policies, by_name=False):
    """The gradients of p, z, the rest and the weight; the rest cannot be named."""
    p, z, rest, weight = (torch.tensor([value], requires_grad=True) for value in (2.0, 5.0, 1.0, 1.0))
    more = {"weight": {"value": weight}}
    with gp.install(criterion := Criterion(), policies):
        (criterion(z=z, p=p, **more) if by_name else criterion(p, z, rest, **more)).backward()
    return [None if tensor.grad is None else tensor.grad.item() for tensor in (p, z, rest, weight)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (gp.Stop(modules=Criterion, argument="z"), [5.0, None, 2.0, 3.0]),
        (gp.Stop(modules=Criterion, argument=1), [5.0, None, 2.0, 3.0]),
        (gp.Scale(10.0, modules=Criterion, argument=0), [50.0, 2.0, 2.0, 3.0]),
        (gp.Scale(10.0, modules=Criterion, argument=2), [5.0, 2.0, 20.0, 3.0]),
        (gp.Scale(10.0, modules=Criterion, argument="weight"), [5.0, 2.0, 2.0, 30.0]),
    ],
)
def test_one_argument_by_name_or_position(policy, expected):
    assert of_criterion(policy) == expected
    if policy.argument != 2:
        assert of_criterion(policy, by_name=True) == [*expected[:2], None, expected[3]]


def test_tensor_passed_twice_is_stopped_at_one_argument(gradient):
    with gp.install(criterion := Criterion(), [gp.Stop(modules=Criterion, argument="z")]):
        found, _ = gradient(lambda x: criterion(x, x), torch.tensor([3.0]))
    assert found == 3.0


def test_policies_on_different_arguments():
    ten, cut = gp.Scale(10.0, modules=Criterion, argument="p"), gp.Stop(modules=Criterion, argument="z")
    assert of_criterion(ten, cut) == [50.0, None, 2.0, 3.0]
    assert of_criterion(gp.Clip(value=4.0, modules=Criterion), ten) == [40.0, 2.0, 2.0, 3.0]
    with pytest.raises(gp.PolicyError, match="contradict each other at the input of module ''"):
        gp.install(Criterion(), [gp.Scale(2.0, modules=Criterion), cut])


class Collects(nn.Module):
    def forward(self, *rest, **more):
        return rest[0] + more["a"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gp.Stop(modules="a", at="output", argument="z"), r"Stop\.argument: is of the input"),
        (lambda: gp.Stop(params="*", argument="z"), r"Stop: argument= goes with modules= or ops="),
        (lambda: gp.Stop(modules="a", argument=-1), r"argument: positions count from 0, got -1"),
        (lambda: gp.Stop(modules="a", argument=True), r"argument: expected a name or a number, got True"),
        (lambda: gp.Stop(modules="a", output=0), r"Stop\.output: goes with at='through'"),
        (lambda: gp.Stop(modules="a", inside="own"), r"Stop\.inside: goes with at='through'"),
        (lambda: gp.Stop(modules="a", at="through", inside="all"), r"Stop\.inside: unknown choice 'all'"),
        (
            lambda: gp.Stop(modules="a", at="through", output=1.5),
            r"output: expected a name or a number, got 1.5",
        ),
        (lambda: gp.Guided(modules="a", at="through"), r"Guided: at='through' goes with modules= alone"),
        (
            lambda: gp.install(Criterion(), {"cut": gp.Stop(modules=Criterion, argument="q")}),
            r"policy 'cut' at module '': unknown argument 'q'; .*'p'",
        ),
        (
            lambda: gp.install(nn.Sequential(nn.Linear(2, 2)), [gp.Stop(modules="0", argument=1)]),
            r"takes 1: input",
        ),
        (
            lambda: gp.install(Collects(), [gp.Stop(modules=Collects, argument="rest")]),
            "unknown argument 'rest'",
        ),
    ],
)
def test_contradictory_settings_are_refused(make, message):
    with pytest.raises(gp.PolicyError, match=message):
        make()


def test_a_module_that_writes_to_its_input(gradient):
    relu = nn.ReLU(inplace=True)

    def residual(x):
        work = x * 1
        return 10 * relu(work) + work

    with gp.install(relu, [gp.Scale(3.0, modules="*"), gp.Clip(value=20.0, modules="*")]):
        found, value = gradient(residual, torch.tensor([-1.0, 2.0]))
    assert torch.equal(value, torch.tensor([0.0, 22.0]))
    assert torch.equal(found, torch.tensor([0.0, 20.0]))
