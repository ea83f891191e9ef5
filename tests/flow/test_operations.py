"""Operations: every spelling has the rule, in eager mode and in compiled code."""

import functools
import inspect
import math
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradpolicy as gp
from gradpolicy.flow.operation_rule import OPAQUE_CALLS
from gradpolicy.flow.operations import operation_names, resolve_operation

X = torch.tensor([-1.7, -0.3, 0.4, 2.6])


def ten_times(grad, inputs, output):
    """Ten for the first floating-point input, nothing for the others."""
    first = next(n for n, t in enumerate(inputs) if t.is_floating_point())
    shape = inputs[first].shape
    return tuple(grad.new_full(shape, 10.0) if n == first else None for n in range(len(inputs)))


def in_place(function, *args, **kwargs):
    """Call a function or method that writes to its argument, and drop what it returns."""

    def call(x):
        work = x * 1
        method = functools.partial(function, work) if callable(function) else getattr(work, function)
        method(*args, **kwargs)
        return work

    return call


SPELLINGS = {
    "relu": [
        F.relu,
        torch.relu,
        torch.Tensor.relu,
        nn.ReLU(),
        in_place("relu_"),
        in_place(F.relu, inplace=True),
        in_place(lambda work: torch.relu_(input=work)),
        in_place(F.relu_),
        torch.ops.aten.relu,
        torch.ops.aten.relu.default,
        nn.Threshold(0, 0),
        lambda x: torch.clamp(x, min=0),
        in_place("clip_", 0.0),
        in_place("clamp_min_", 0),
    ],
    "relu6": [
        F.relu6,
        nn.ReLU6(),
        lambda x: F.hardtanh(x, 0.0, 6.0),
        in_place(F.relu6, inplace=True),
        in_place("clamp_", 0, max=6),
    ],
    "maximum": [lambda x: torch.maximum(x, X), lambda x: torch.max(x, X), lambda x: x.max(other=X)],
    "minimum": [lambda x: torch.minimum(x, X), lambda x: torch.min(x, other=X), lambda x: x.min(X)],
    "leaky_relu": [F.leaky_relu, nn.LeakyReLU(), in_place(F.leaky_relu, inplace=True)],
    "gelu": [F.gelu, nn.GELU(), lambda x: F.gelu(x, approximate="tanh")],
    "silu": [F.silu, nn.SiLU(), in_place(F.silu, inplace=True)],
    "sigmoid": [torch.sigmoid, F.sigmoid, torch.special.expit, nn.Sigmoid(), in_place("sigmoid_")],
    "tanh": [torch.tanh, F.tanh, nn.Tanh(), torch.Tensor.tanh, in_place("tanh_")],
    "hardtanh": [F.hardtanh, nn.Hardtanh(), in_place(F.hardtanh, inplace=True)],
    # More spellings of this and of softmax are in test_call_arguments.py.
    "clamp": [lambda x: torch.clip(x, max=1), in_place("clip_", -1, 1), in_place("clamp_min_", 0)],
    "floor": [torch.floor, torch.Tensor.floor, in_place("floor_")],
    "ceil": [torch.ceil, torch.Tensor.ceil, in_place("ceil_")],
    "round": [torch.round, torch.Tensor.round, lambda x: torch.round(x, decimals=1), in_place("round_")],
    "trunc": [torch.trunc, torch.fix, torch.Tensor.trunc, in_place("trunc_")],
    "sign": [torch.sign, torch.Tensor.sign, in_place("sign_")],
    "heaviside": [lambda x: torch.heaviside(x, torch.tensor(0.5)), in_place("heaviside_", torch.tensor(0.5))],
    "floor_divide": [
        lambda x: x // 2,
        lambda x: torch.floor_divide(x, 2),
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: x.floor_divide(2),
        in_place("__ifloordiv__", 2),
        lambda x: x.div(2, rounding_mode="floor"),
        lambda x: operator.floordiv(x, 2),
        lambda x: 3 // x,
        lambda x: x.__rfloordiv__(3),
        in_place("floor_divide_", 2),
        in_place("div_", 2, rounding_mode="floor"),
    ],
    "where": [
        lambda x: torch.where(x.detach() > 0, x, torch.zeros(4)),
        lambda x: x.where(x.detach() > 0, torch.zeros(4)),
        lambda x: torch.where(input=x, other=torch.zeros(4), condition=x.detach() > 0),
    ],
    "max_pool": [
        lambda x: F.max_pool1d(x[None], 1)[0],
        lambda x: nn.MaxPool1d(1)(x[None])[0],
        lambda x: torch.max_pool2d(x.view(1, 2, 2), 1).view(4),
        lambda x: F.max_pool3d(x.view(1, 1, 2, 2), 1).view(4),
        lambda x: nn.MaxPool2d(1, return_indices=True)(x.view(1, 2, 2))[0].view(4),
    ],
    "bernoulli": [
        lambda x: torch.bernoulli(torch.sigmoid(x)),
        lambda x: torch.sigmoid(x).bernoulli(),
        lambda x: torch.empty(4).bernoulli_(torch.sigmoid(x)),
        lambda x: torch.empty(4).bernoulli_(p=torch.sigmoid(x)),
        lambda x: torch.empty(4, dtype=torch.bool).bernoulli_(torch.sigmoid(x)).float(),
    ],
    "gt": [
        lambda x: (x > 0).float(),
        lambda x: torch.gt(x, 0).float(),
        lambda x: x.gt(0).float(),
        in_place("gt_", 0),
    ],
    "int": [
        lambda x: x.int().float(),
        lambda x: x.to(torch.int32).float(),
        lambda x: x.to("cpu", dtype=torch.int).float(),
        lambda x: x.type(torch.int32).float(),
        lambda x: x.type_as(torch.ones(1, dtype=torch.int32)).float(),
        lambda x: x.to(torch.ones(1, dtype=torch.int32)).float(),
    ],
    "long": [lambda x: x.long().float(), lambda x: x.to(torch.int64).float()],
    "bool": [
        lambda x: x.bool().float(),
        lambda x: x.to(torch.bool).float(),
        lambda x: x.type(torch.bool).float(),
    ],
    "abs": [abs, operator.abs, torch.Tensor.abs, in_place(torch.abs_), torch.Tensor.__abs__],
    "pow": [lambda x: x**2, lambda x: 2**x, in_place("__ipow__", 2), lambda x: torch.pow(x, 2)],
    "sub": [lambda x: x - 1, lambda x: 1 - x, lambda x: torch.Tensor.__rsub__(x, 1)],
    "div": [lambda x: x / 2, lambda x: 1 / x, lambda x: torch.Tensor.__rdiv__(x, 1)],
    "mul": [lambda x: x * x.detach(), lambda x: torch.mul(x, x.detach()), lambda x: 2 * x],
    "addcmul": [lambda x: torch.addcmul(x, X, X, value=2), lambda x: (x + 0).addcmul_(X, X)],
    "getitem": [lambda x: x[:], lambda x: x[..., None].view(4), lambda x: x[[1, 0, 3, 2]]],
    "cumsum": [lambda x: torch.cumsum(x, 0), lambda x: x.cumsum(0)],
    torch.cumsum: [lambda x: x.cumsum(0)],
    torch.Tensor.cumsum: [lambda x: torch.cumsum(x, 0)],
}


@pytest.mark.parametrize("name", SPELLINGS, ids=lambda name: getattr(name, "__name__", name))
def test_every_spelling(name, gradient):
    for number, spelling in enumerate(SPELLINGS[name]):
        torch.manual_seed(1)
        plain = spelling(X * 1)
        with gp.gradient_override({name: ten_times}):
            torch.manual_seed(1)
            found, value = gradient(spelling, X)
        inner = torch.sigmoid(X) * (1 - torch.sigmoid(X)) if name == "bernoulli" else 1.0
        assert torch.equal(value, plain.to(value.dtype)), f"{name} {number}: the forward value changed"
        torch.testing.assert_close(found, torch.full((4,), 10.0) * inner, msg=f"{name} {number}")


@pytest.mark.parametrize(
    ("name", "dim"),
    [("argmax", None), ("argmin", 0), ("argmax-to-one-hot", -1), ("argmax_one_hot", 0), (torch.argmin, -1)],
)
def test_one_hot_of_argmax_and_argmin(name, dim, gradient):
    scores, count = torch.randn(3, 4), {None: 12, 0: 3, -1: 4}[dim]

    def one_hot(x):
        return F.one_hot((x.argmin if name in ("argmin", torch.argmin) else x.argmax)(dim), count).to(x.dtype)

    weights = torch.randn_like(one_hot(scores))
    with gp.gradient_override({name: "identity"}):
        found, value = gradient(one_hot, scores, weights)
    assert torch.equal(value, one_hot(scores))
    torch.testing.assert_close(found, weights.view(3, 4) if dim is None else weights.movedim(-1, dim))


@pytest.mark.parametrize(
    ("name", "call", "expected"),
    [
        ("hardtanh", nn.ReLU6(), [0.0, 0.0, 1.0, 1.0]),
        ("relu6", nn.Hardtanh(), [0.0, 1.0, 1.0, 0.0]),
        ("floor_divide", lambda x: x / 2, [0.5] * 4),
        ("relu", lambda x: x.clamp(0, 1) + x.clip(max=0) + F.threshold(x, 1.0, 0.0), [1.0, 1.0, 1.0, 1.0]),
        ("relu6", lambda x: torch.clamp(x, 0, 2), [0.0, 0.0, 1.0, 0.0]),
        ("max", lambda x: torch.max(x, X[0]) + x.max(), [0.5 + 10, 11.0, 11.0, 11.0]),
        ("div", lambda x: x / 2 + torch.div(x, 2, rounding_mode="floor"), [10.0] * 4),
        ("bernoulli", lambda x: x + (x * 1).bernoulli_(0.5), [1.0] * 4),
    ],
)
def test_calls_of_other_operations(name, call, expected, gradient):
    with gp.gradient_override({name: ten_times}):
        found, _ = gradient(call, X)
    assert found.tolist() == expected


@pytest.mark.parametrize("names", [("relu", "clamp"), ("clamp", "relu")])
def test_a_rule_on_a_function_comes_before_one_on_what_its_arguments_make_it(names, gradient):
    rules = {"relu": ten_times, "clamp": "identity"}
    with gp.gradient_override({name: rules[name] for name in names}, strict=True):
        found, _ = gradient(lambda x: x.clamp(min=0) + x.relu(), X)
    assert found.tolist() == [11.0] * 4


def test_operations_by_function_and_pickled():
    for name in operation_names():
        operation = resolve_operation(name)
        assert pickle.loads(pickle.dumps(operation)) == operation
    assert resolve_operation(torch.Tensor.__floordiv__).name == "floor_divide"
    assert resolve_operation(torch.special.expit) == resolve_operation("sigmoid")


def test_operator_of_torch_library(gradient):
    @torch.library.custom_op("tests_flow::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    operator, names = (
        torch.ops.tests_flow.halved,
        ("tests_flow::halved", "torch.ops.tests_flow.halved.default"),
    )
    for key in (halved, operator, operator.default, *names):
        with gp.gradient_override({key: "identity"}):
            found, _ = gradient(halved, X)
        assert torch.equal(found, torch.ones(4))
        assert (
            pickle.loads(pickle.dumps(resolve_operation(key))).functions == resolve_operation(key).functions
        )


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (nn.ReLU, "'relu'"),
        (nn.ReLU(), "'relu'"),
        (math.floor, "'floor'"),
        (lambda x: x + 1, "never arrives"),
        (3, "name or a torch function"),
        ("roud", "'round'"),
        ("ReLU", "'relu'"),
        ("nn.ReLU", "unknown operation 'nn.ReLU'; did you mean 'relu'"),
        ("torch.nn.ReLU", "did you mean 'relu'"),
        ("nowhere.relu", "needs nowhere, which is not installed$"),
        ("nowhere::relu", "import the library that registers it"),
        ("flor_divide", "floor_divide"),
        ("init", "unknown"),
    ],
)
def test_unknown_operations_are_refused(wrong, hint):
    with pytest.raises(gp.PolicyError, match=hint):
        gp.gradient_override({wrong: "identity"})


def test_opaque_calls_are_complete():
    """A new release of torch may bring functions that hide others: this says which to add."""
    hidden = {"relu", "softmax", "tanh", "sigmoid", "gelu", "silu", "abs", "log", "linear", "bmm"}
    hidden |= {"scaled_dot_product_attention"}
    spelled = {f for name in hidden for f in resolve_operation(name).functions}
    for name, function in inspect.getmembers(F, inspect.isfunction):
        if function in spelled or name.startswith("_") or not hasattr(function, "__code__"):
            continue
        if hidden & set(function.__code__.co_names) and "has_torch_function" in str(
            function.__code__.co_names
        ):
            assert function in OPAQUE_CALLS, name


COMPILED = [name for name in SPELLINGS if isinstance(name, str) and name != "bernoulli"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("relu", "abs"))) for name in COMPILED],
)
def test_every_spelling_in_compiled_code(name, compiled, gradient):
    of_graphs = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    calls = [call for call in SPELLINGS[name] if not isinstance(call, of_graphs)]

    def all_of_them(x):
        return torch.stack([call(x) for call in calls])

    with gp.gradient_override({name: ten_times}):
        torch.testing.assert_close(gradient(compiled(all_of_them), X), gradient(all_of_them, X))


def test_compiled_code_after_the_block_is_plain(compiled, gradient):
    x = torch.tensor([1.0, -2.0])
    five_times = gp.Rule("five_times", lambda grad, inputs, output: 5.0 * grad)
    with gp.gradient_override({"relu": five_times, "abs": five_times}):
        found, _ = gradient(compiled(lambda x: abs(torch.relu_(torch.relu(x)))), x)
    assert found.tolist() == [125.0, 125.0]
    torch._dynamo.reset()
    assert gradient(compiled(abs), x)[0].tolist() == [1.0, -1.0]
