import dataclasses
from collections import OrderedDict, deque, namedtuple
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn

import gradpolicy as gp

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: torch.Tensor
    note: str = "kept"


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


HOLDERS = [
    lambda x: SimpleNamespace(x=x),
    lambda x: SimpleNamespace(parts=[{"x": x}]),
    lambda x: {"deep": (deque([x]), 1)},
    lambda x: (each for each in [x]),
    Slots,
]


class Model(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.middle = middle
        self.after = nn.Linear(3, 1)

    def forward(self, x):
        return self.after(self.middle(self.before(x)))


CONTAINERS = {
    "tensor": (lambda x: x, lambda tree: tree),
    "tuple": (lambda x: (x, 1, None), lambda tree: tree[0]),
    "list": (lambda x: [x, "a"], lambda tree: tree[0]),
    "dict": (lambda x: {"x": x, "n": 2}, lambda tree: tree["x"]),
    "nested": (lambda x: {"x": [(x,)]}, lambda tree: tree["x"][0][0]),
    "named tuple": (lambda x: Pair(x, 3), lambda tree: tree.left),
    "ordered dict": (lambda x: OrderedDict(x=x), lambda tree: tree["x"]),
    "read-only dict": (lambda x: MappingProxyType({"x": x}), lambda tree: tree["x"]),
    "dataclass": (Frozen, lambda tree: tree.left),
}


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_boundary_acts_on_tensors_in_any_container(kind, side, gradient):
    pack, unpack = CONTAINERS[kind]
    module = nn.ModuleDict({"part": PassOn()})
    module.forward = lambda x: unpack(module["part"](pack(x)))
    with gp.install(module, [gp.Scale(3.0, modules="part", at=side)]):
        result = module["part"](pack(torch.ones(3, requires_grad=True)))
        assert type(result) is type(pack(torch.ones(3)))
        found, value = gradient(module, torch.ones(3))
    assert torch.equal(found, torch.full((3,), 3.0))
    assert torch.equal(value, torch.ones(3))


def test_stop_by_zeros_keeps_the_graph_also_for_gradients_that_are_not_finite():
    model = Model(nn.Linear(3, 3))
    with gp.install(model, [gp.Stop("zero", modules="middle")]):
        (model(torch.randn(5, 3)).sum() * torch.inf).backward()
    assert not model.before.weight.grad.any()
    assert not model.middle.weight.grad.isfinite().all()


def test_clipping_by_sample(gradient):
    model, x, weights = Model(PassOn()), torch.randn(4, 3), torch.randn(4, 3)
    model.forward = lambda x: model.middle(x)
    with gp.install(model, [gp.Clip(norm=0.1, per_sample=True, modules="middle")]):
        found, _ = gradient(model, x, weights)
    torch.testing.assert_close(found, weights * (0.1 / weights.norm(dim=1, keepdim=True)).clamp(max=1))


def test_absolute_thresholds_follow_the_loss_scale(gradient):
    model, weights = PassOn(), torch.tensor([3.0, -0.2, 0.7])
    with gp.install(model, [gp.Clip(value=0.5, modules=PassOn)]) as installed:
        for scale in (1.0, 1024.0, torch.tensor(2.0**16)):
            installed.set_loss_scale(scale)
            found, _ = gradient(model, torch.ones(3), weights * scale)
            torch.testing.assert_close(found / scale, weights.clamp(-0.5, 0.5))


def test_policies_at_one_boundary_act_in_the_order_in_which_they_are_declared(gradient):
    model, weights = PassOn(), torch.tensor([3.0, 0.3, -2.0])
    clip, scale = gp.Clip(value=1.0, modules=PassOn), gp.Scale(2.0, modules=PassOn)
    with gp.install(model, [clip, scale]):
        found, _ = gradient(model, torch.ones(3), weights)
        torch.testing.assert_close(found, 2 * weights.clamp(-1, 1))
    with gp.install(model, [scale, clip]):
        found, _ = gradient(model, torch.ones(3), weights)
        torch.testing.assert_close(found, (2 * weights).clamp(-1, 1))


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("off", [gp.Stop, lambda **where: gp.Reverse(2.0, **where)])
def test_a_policy_that_is_off_does_nothing_beside_one_that_is_on(side, off, gradient):
    model = PassOn()
    policies = {
        "on": gp.Scale(3.0, modules=PassOn, at=side, when=gp.When(stop=1)),
        "off": off(modules=PassOn, at=side, when=gp.When(start=1)),
    }
    with gp.install(model, policies) as installed:
        installed.update(step=0)
        found, _ = gradient(model, torch.ones(3))
        assert installed.operation_counts == {"on": 1, "off": 0}
    assert torch.equal(found, torch.full((3,), 3.0))


@pytest.mark.parametrize("factor", [lambda step: 0.1 * step, gp.schedules.Linear(0.0, 1.0, steps=10)])
def test_a_schedule_sets_the_factor_at_each_step(factor, gradient):
    model = PassOn()
    with gp.install(model, [gp.Reverse(factor, modules=PassOn)]) as installed:
        for step in (0, 3, 7):
            installed.update(step=step)
            found, _ = gradient(model, torch.ones(3))
            torch.testing.assert_close(found, torch.full((3,), -0.1 * step))


def test_a_schedule_counts_epochs_where_its_policy_does(gradient):
    model, when = PassOn(), gp.When(unit="epoch")
    with gp.install(model, [gp.Scale(lambda epoch: 10.0 * epoch, modules=PassOn, when=when)]) as installed:
        for step, epoch in ((0, 0), (7, 1), (9, 2)):
            installed.update(step=step, epoch=epoch)
            found, _ = gradient(model, torch.ones(3))
            assert torch.equal(found, torch.full((3,), 10.0 * epoch))


@pytest.mark.parametrize("backend", [None, "eager"])
def test_backward_uses_the_scheduled_number_of_its_forward(backend):
    model, x = PassOn(), torch.ones(3, requires_grad=True)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    with gp.install(model, [gp.Scale(lambda step: 1.0 + step, modules=PassOn)]) as installed:
        results = []
        for step in range(3):
            installed.update(step=step)
            results.append(run(x))
    for step, result in enumerate(results):
        (found,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(found, torch.full((3,), 1.0 + step))


def test_a_module_that_writes_to_its_input_gives_later_readers_the_new_gradient(gradient):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            work = x * 1
            return 10 * self.relu(work) + work

    model, x = Residual(), torch.tensor([-1.0, 2.0])
    plain, value = gradient(model, x)
    assert torch.equal(plain, torch.tensor([0.0, 11.0]))
    with gp.install(model, [gp.Scale(3.0, modules="relu")]):
        found, again = gradient(model, x)
    assert torch.equal(again, value)
    assert torch.equal(found, 3 * plain)


class Weighted(nn.Module):
    def forward(self, x, /, *more, weight, power=2, **others):
        return x * weight


@pytest.mark.parametrize("at", ["input", "output", "through"])
def test_a_rule_sees_the_other_arguments_of_the_module_by_name(at):
    seen = []

    def by_weight(grad, inputs, output, *, call):
        seen.append(call)
        return grad * call.arguments["weight"]

    x, weight = torch.ones(2, requires_grad=True), torch.tensor([3.0, 5.0])
    with gp.install(model := Weighted(), [gp.UseRule(by_weight, modules=Weighted, at=at)]):
        model(x, 7, weight=weight, mode="train").sum().backward()
    assert torch.equal(x.grad, weight if at == "through" else weight**2)
    (call,) = seen
    assert call.operation == ("" if at == "through" else f"{at} of module ''")
    assert {key: call.arguments[key] for key in ("more", "power", "mode")} == {
        "more": (7,),
        "power": 2,
        "mode": "train",
    }
    assert not call.arguments["x"].requires_grad


@pytest.mark.parametrize("at", ["input", "output"])
def test_compiled_code_sees_them_too(at):
    torch._dynamo.reset()

    def by_weight(grad, inputs, output, *, call):
        return grad * call.arguments["weight"]

    x, weight = torch.ones(2, requires_grad=True), torch.tensor([3.0, 5.0])
    with gp.install(model := Weighted(), [gp.UseRule(by_weight, modules=Weighted, at=at)]):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x, weight=weight).sum().backward()
    assert torch.equal(x.grad, weight**2)


def test_what_is_no_gradient_s_business_is_passed_on_as_it_is():
    model = PassOn()
    given = {"labels": torch.tensor([1, 2]), "cache": [torch.ones(2)], "mode": "train"}
    with gp.install(model, [gp.Scale(2.0, modules=PassOn)]):
        assert model(given) is given


@pytest.mark.parametrize("holder", HOLDERS)
def test_tensors_in_other_objects_are_reported_not_silently_plain(holder):
    model = PassOn()
    with gp.install(model, {"double": gp.Scale(2.0, modules=PassOn)}) as installed:
        with pytest.warns(
            UserWarning, match="'double' cannot see into (SimpleNamespace|deque|Slots|generator) at input of"
        ):
            model(holder(torch.ones(2, requires_grad=True)))
        assert installed.report().rows[0].opaque_calls
        model(holder(torch.ones(2, requires_grad=True)))


def test_double_backward_through_a_boundary():
    model, x = PassOn(), torch.tensor([2.0, 3.0], requires_grad=True)
    with gp.install(model, [gp.Scale(3.0, modules=PassOn)]):
        y = (model(x) ** 3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    torch.testing.assert_close(first, 9 * x**2)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 54 * x)


def test_func_grad_through_a_boundary():
    model, x = Model(nn.Linear(3, 3)), torch.randn(3)
    plain = torch.func.grad(lambda x: model(x).sum())(x)
    with gp.install(model, [gp.Reverse(2.0, modules="middle")]):
        found = torch.func.grad(lambda x: model(x).sum())(x)
        each = torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x[None])
    torch.testing.assert_close(found, -2 * plain)
    torch.testing.assert_close(each[0], -2 * plain)


def test_forward_mode_through_a_boundary_is_refused_and_a_cut_is_zero():
    model, x = PassOn(), torch.randn(3)
    with (
        gp.install(model, [gp.Scale(2.0, modules=PassOn)]),
        pytest.raises(gp.PolicyError, match="'scale' at input of module '' has no forward-mode derivative"),
    ):
        torch.func.jvp(model, (x,), (x,))
    with gp.install(model, [gp.Stop(modules=PassOn)]):
        assert torch.equal(torch.func.jvp(model, (x,), (x,))[1], torch.zeros(3))


def test_transformers_like_outputs_that_are_dicts_and_dataclasses(gradient):
    transformers = pytest.importorskip("transformers.modeling_outputs")

    class Encoder(nn.Module):
        def forward(self, x):
            return transformers.BaseModelOutput(last_hidden_state=x)

    model = Encoder()
    with gp.install(model, [gp.Scale(2.0, modules=Encoder, at="output")]):
        found, _ = gradient(
            lambda x: model(x)["last_hidden_state"] + model(x).last_hidden_state, torch.ones(2)
        )
    assert torch.equal(found, torch.full((2,), 4.0))


@pytest.mark.parametrize(
    "calls",
    [
        [lambda x: x, lambda x: SimpleNamespace(x=x)],
        [lambda x: (x, SimpleNamespace(x=x))],
    ],
)
def test_a_tensor_in_another_object_is_reported_in_a_later_call_and_beside_others(calls):
    model = PassOn()
    with gp.install(model, {"double": gp.Scale(2.0, modules=PassOn)}) as installed:
        for call in calls[:-1]:
            model(call(torch.ones(2, requires_grad=True)))
        with pytest.warns(UserWarning, match="'double' cannot see into SimpleNamespace"):
            model(calls[-1](torch.ones(2, requires_grad=True)))
        assert list(installed.report().rows[0].opaque_calls) == ["SimpleNamespace at input of module ''"]
