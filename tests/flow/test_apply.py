"""``gp.apply``: any forward, NumPy code included, with a rule as its backward."""

import functools
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

import gradpolicy as gp

X = torch.tensor([0.2, 1.7])
WEIGHT = torch.ones(2, 2, requires_grad=True)


def add_grad(grad, inputs, output):
    return grad, grad.sum(), None


def test_numpy_forward_of_several_inputs():
    c, k = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    d = torch.tensor([1, 2, 3])

    def forward(c, k, d, mode, *, bias):
        assert mode == "sum"
        return np.add(c.numpy() * k.numpy(), d.numpy()) + bias

    y = gp.apply(add_grad, forward, c, k, d, "sum", bias=1)
    torch.testing.assert_close(y.detach(), (c * k + d + 1).detach(), check_dtype=False)
    y.sum().backward()
    assert torch.equal(c.grad, torch.ones(3))
    assert k.grad == 3.0
    assert c.grad.dtype == torch.float32


def test_rule_gets_tuples_for_several_results():
    Parts = namedtuple("Parts", ["whole", "rest", "index"])

    def rule(grads, inputs, outputs):
        assert (len(grads), len(outputs)) == (2, 3)
        assert outputs[2].equal(inputs[0].argmax())
        return grads[0] + 10 * grads[1]

    x = torch.tensor([1.25, 2.5], requires_grad=True)
    parts = gp.apply(rule, lambda x: Parts(x.floor(), torch.fmod(x, 1), x.argmax()), x)
    (parts.whole + parts.rest).sum().backward()
    assert torch.equal(parts.rest.detach(), torch.tensor([0.25, 0.5]))
    assert parts.index.dtype == torch.int64
    assert torch.equal(x.grad, torch.full((2,), 11.0))


@gp.rule("test_apply_sort")
def sort_grad(grad, inputs, output):
    return torch.zeros_like(inputs[0]).scatter(-1, output[1], grad)


def test_rule_sees_integer_results(run):
    x = torch.tensor([[0.5, -1.0, 2.0], [3.0, 1.0, 2.0]], dtype=torch.float64)

    def sort(x):
        return (gp.apply("test_apply_sort", torch.sort, x)[0] * torch.arange(3)).sum()

    order = torch.tensor([[1.0, 0.0, 2.0], [2.0, 0.0, 1.0]], dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    assert torch.autograd.grad(run(sort)(leaf), leaf)[0].equal(order)
    assert gp.gradcheck_rule("test_apply_sort", torch.sort, x).exact
    assert torch.func.vmap(torch.func.grad(sort))(x).equal(order)


def test_under_func_and_with_a_second_derivative():
    def rounded(x):
        return gp.apply(lambda grad, inputs, output: grad * inputs[0] ** 3, torch.round, x)

    first = torch.func.grad(rounded)
    assert torch.func.vmap(first)(torch.tensor([1.0, 2.0])).tolist() == [1.0, 8.0]
    assert torch.func.grad(first)(torch.tensor(2.0)) == 3 * 2.0**2


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("no", "str"),
        (2**70, "int"),
        (np.array(["no"]), "an array of <U2"),
        ((1.0, np.datetime64("2020")), "datetime64"),
    ],
)
def test_a_forward_must_return_tensors_or_arrays_of_numbers(value, kind):
    with pytest.raises(gp.PolicyError, match=f"returned {kind}; it must return"):
        gp.apply("identity", lambda x: value, torch.randn(3))


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x * WEIGHT,
        nn.Linear(2, 2),
        functools.partial(torch.mul, WEIGHT),
    ],
)
def test_warns_of_tensors_that_are_not_arguments(forward):
    x = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match="needs a gradient and is not among its arguments"):
        gp.apply(lambda grad, inputs, output: torch.ones(2), forward, x).sum().backward()
    assert x.grad is not None


def with_gradients_inside(x):
    with torch.enable_grad():
        point = x.clone().requires_grad_()
        return torch.autograd.grad((point * point).sum(), point)[0]


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x * WEIGHT.detach(),
        lambda x: x * WEIGHT.numel() + torch.zeros_like(WEIGHT),
        with_gradients_inside,
        torch.round,
    ],
)
def test_no_warning_without_such_tensors(forward, recwarn):
    gp.apply("identity", forward, torch.ones(2, requires_grad=True)).sum().backward()
    with torch.no_grad():
        gp.apply("identity", lambda x: x * WEIGHT, torch.ones(2))
    assert not recwarn.list


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: np.floor(x).astype(np.int64),
        lambda x: x.astype(np.float64).round(),
        lambda x: np.full(2, x.std()),
    ],
)
def test_numpy_forward_gets_arrays_once(forward):
    calls = []

    def counted(x, pair):
        calls.append((type(x), type(pair["y"])))
        return forward(x)

    x = X.clone().requires_grad_()
    rule = lambda grad, inputs, output: (torch.full_like(inputs[0], 3.0), None)  # noqa: E731
    y = gp.apply(rule, counted, x, numpy=True, pair={"y": X})
    assert calls == [(np.ndarray, np.ndarray)]
    assert type(y) is torch.Tensor
    torch.testing.assert_close(y.detach(), torch.as_tensor(forward(X.numpy())).to(y.dtype))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


KEPT = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x,
        lambda x: np.add(x, 1, out=x),
        lambda x: KEPT,
        lambda x: x[::-1],
        lambda x: x.astype(">f4"),
        lambda x: x.astype(">i8")[::-1],
        lambda x: np.broadcast_to(x, (2, 2)),
    ],
)
def test_numpy_forward_shares_no_memory_and_returns_arrays_of_any_layout(forward, recwarn):
    leaf = X.clone().requires_grad_()
    for tensor in (leaf, leaf * 1, X.clone()):
        y = gp.apply("identity", forward, tensor, numpy=True).detach()
        assert y.tolist() == forward(X.numpy().copy()).tolist()
        y += 1
        assert tensor.equal(X)
    assert not KEPT.any()
    assert not recwarn.list


def test_torch_forward_that_writes_to_its_argument():
    leaf = X.clone().requires_grad_()
    with pytest.raises(gp.PolicyError, match=r"'add_' writes in place to a leaf that needs a gradient"):
        gp.apply("identity", torch.Tensor.add_, leaf, 1)
    hidden = leaf * 1
    gp.apply("identity", torch.Tensor.add_, hidden, 1).sum().backward()
    assert leaf.equal(X)
    assert hidden.equal(X)
    assert leaf.grad.equal(torch.ones(2))
    mean = torch.zeros(2)
    gp.apply(lambda grad, *_: (grad, None), lambda x, mean: x - mean.add_(1), leaf, mean)
    assert mean.equal(torch.ones(2))


def test_numpy_forward_gets_the_values_of_a_view_that_is_negated_when_it_is_read():
    negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negated.is_neg()
    assert gp.apply("identity", lambda x: 2 * x, negated, numpy=True).tolist() == [-4.0, 8.0]


def test_arrays_of_bfloat16_are_float32():
    def forward(x):
        assert x.dtype == np.float32
        return x.astype(np.float64)

    x = torch.tensor([0.5, 1.5], dtype=torch.bfloat16, requires_grad=True)
    y = gp.apply("identity", forward, x, numpy=True)
    assert y.tolist() == [0.5, 1.5]
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.jacrev])
def test_numpy_under_torch_func_is_refused(transform):
    with pytest.raises(gp.PolicyError, match="NumPy code, which has no arrays"):
        transform(lambda x: gp.apply("identity", np.floor, x, numpy=True).sum())(X)


@pytest.mark.parametrize("rule", ["torch.sin", torch.sin, "sin"])
def test_gradient_of_another_operation(rule, gradient, as_module):
    found = [gradient(lambda x: gp.apply(rule, np.floor, x), X)[0]]
    with gp.gradient_override({"floor": rule}):
        found.append(gradient(torch.floor, X)[0])
    for policy in (gp.UseRule(rule, ops=["floor"]), gp.StraightThrough(rule, modules="*")):
        with gp.install(model := as_module(torch.floor), [policy]):
            found.append(gradient(model, X)[0])
    for one in found:
        torch.testing.assert_close(one, torch.cos(X))


def test_bare_name_is_the_rule_and_path_the_operation():
    assert gp.UseRule("sigmoid", ops="round").rule.name == "sigmoid"
    assert gp.UseRule("torch.sigmoid", ops="round").rule.name == "derivative of sigmoid"
    assert gp.UseRule("torch.nn.functional.gelu", ops="relu").rule.name == "derivative of gelu"


@pytest.mark.parametrize("path", ["torch.sine", "torch.nn.functional.sine"])
def test_a_path_to_no_operation_is_refused(path):
    with pytest.raises(gp.PolicyError, match=f"UseRule.rule: unknown operation '{path}'"):
        gp.UseRule(path, ops="round")
