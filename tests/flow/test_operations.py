import inspect
import math
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradpolicy as gp
from gradpolicy.flow.operation_tables import OPAQUE_CALLS
from gradpolicy.flow.operations import operation_names, resolve_operation

X = torch.tensor([-1.7, -0.3, 0.4, 2.6])
PROBABILITIES = torch.tensor([0.1, 0.4, 0.6, 0.9])


def ten_times(grad, inputs, output):
    """Ten for the first floating-point input, nothing for the others."""
    first = next(n for n, t in enumerate(inputs) if t.is_floating_point())
    shape = inputs[first].shape
    return tuple(grad.new_full(shape, 10.0) if n == first else None for n in range(len(inputs)))


def in_place(name, *args, **kwargs):
    def call(x):
        work = x * 1
        getattr(work, name)(*args, **kwargs)
        return work

    return call


def functional_in_place(function, **kwargs):
    def call(x):
        work = x * 1
        function(work, inplace=True, **kwargs)
        return work

    return call


def floor_divide_in_place(x):
    work = x * 1
    work //= 2
    return work


SPELLINGS = {
    "relu": [
        F.relu,
        torch.relu,
        torch.Tensor.relu,
        nn.ReLU(),
        in_place("relu_"),
        functional_in_place(F.relu),
        lambda x: torch.relu_(x * 1),
        lambda x: F.relu_(x * 1),
        nn.Sequential(nn.Identity(), nn.ReLU()),
        torch.ops.aten.relu,
        torch.ops.aten.relu.default,
    ],
    "relu6": [F.relu6, nn.ReLU6(), lambda x: F.hardtanh(x, 0.0, 6.0), functional_in_place(F.relu6)],
    "leaky_relu": [
        F.leaky_relu,
        nn.LeakyReLU(),
        functional_in_place(F.leaky_relu),
        lambda x: F.leaky_relu_(x * 1),
    ],
    "gelu": [F.gelu, nn.GELU(), lambda x: F.gelu(x, approximate="tanh")],
    "silu": [F.silu, nn.SiLU(), functional_in_place(F.silu)],
    "sigmoid": [torch.sigmoid, F.sigmoid, torch.special.expit, nn.Sigmoid(), in_place("sigmoid_")],
    "tanh": [torch.tanh, F.tanh, nn.Tanh(), torch.Tensor.tanh, in_place("tanh_")],
    "softmax": [
        lambda x: F.softmax(x, 0),
        lambda x: x.softmax(0),
        nn.Softmax(0),
        lambda x: torch.softmax(x, 0),
    ],
    "hardtanh": [F.hardtanh, nn.Hardtanh(), functional_in_place(F.hardtanh)],
    "clamp": [
        lambda x: torch.clamp(x, -1, 1),
        lambda x: x.clip(-1, 1),
        lambda x: x.clamp_min(0),
        lambda x: torch.clamp(x, min=torch.zeros(4)),
        in_place("clamp_", -1, 1),
        lambda x: torch.clamp_max(x, 1),
        lambda x: torch.clip(x, max=1),
        in_place("clip_", -1, 1),
        in_place("clamp_min_", 0),
    ],
    "floor": [torch.floor, torch.Tensor.floor, in_place("floor_")],
    "ceil": [torch.ceil, torch.Tensor.ceil, in_place("ceil_")],
    "round": [
        torch.round,
        torch.Tensor.round,
        torch.special.round,
        lambda x: torch.round(input=x, decimals=1),
        in_place("round_"),
    ],
    "trunc": [torch.trunc, torch.fix, torch.Tensor.trunc, in_place("trunc_")],
    "sign": [torch.sign, torch.Tensor.sign, in_place("sign_")],
    "heaviside": [lambda x: torch.heaviside(x, torch.tensor(0.5)), in_place("heaviside_", torch.tensor(0.5))],
    "floor_divide": [
        lambda x: x // 2,
        lambda x: torch.floor_divide(x, 2),
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: x.floor_divide(2),
        floor_divide_in_place,
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
        lambda x: torch.distributions.Bernoulli(logits=x).sample(),
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
        lambda x: x.type("torch.IntTensor").float(),
        lambda x: x.type_as(torch.ones(1, dtype=torch.int32)).float(),
        lambda x: x.to(torch.ones(1, dtype=torch.int32)).float(),
    ],
    "long": [lambda x: x.long().float(), lambda x: x.to(torch.int64).float()],
    "bool": [lambda x: x.bool().float(), lambda x: x.to(torch.bool).float()],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_the_same_operation(name, gradient):
    for number, spelling in enumerate(SPELLINGS[name]):
        torch.manual_seed(1)
        plain = spelling(X.clone() * 1)
        with gp.gradient_override({name: ten_times}):
            torch.manual_seed(1)
            found, value = gradient(spelling, X)
        inner = torch.sigmoid(X) * (1 - torch.sigmoid(X)) if name == "bernoulli" else 1.0
        assert torch.equal(value, plain.to(value.dtype)), f"{name} {number}: the forward value changed"
        torch.testing.assert_close(found, torch.full((4,), 10.0) * inner, msg=f"{name} {number}")


def test_bits_of_a_fixed_probability_are_no_function_of_what_they_replace(gradient):
    with gp.gradient_override({"bernoulli": ten_times}):
        found, _ = gradient(lambda x: x + (x * 1).bernoulli_(0.5), X)
    assert torch.equal(found, torch.ones(4))


@pytest.mark.parametrize("name", ["argmax-to-one-hot", "argmax", "argmax_one_hot", torch.argmax])
@pytest.mark.parametrize("dim", [-1, 0])
def test_the_one_hot_code_of_an_argmax_is_a_function_of_its_scores(name, dim, gradient):
    scores, weights = torch.randn(3, 4), torch.randn(4, 3) if dim == 0 else torch.randn(3, 4)

    def one_hot(x):
        return F.one_hot(x.argmax(dim), x.shape[dim]).to(x.dtype)

    with gp.gradient_override({name: "identity"}):
        found, value = gradient(one_hot, scores, weights)
    assert torch.equal(value, one_hot(scores))
    torch.testing.assert_close(found, weights.movedim(-1, dim))


def test_one_hot_codes_of_labels_stay_whole_numbers():
    with gp.gradient_override({"argmax": "identity"}):
        assert F.one_hot(torch.tensor([1, 0]), 3).dtype == torch.int64


def test_relu6_is_not_hardtanh_and_hardtanh_not_relu6(gradient):
    with gp.gradient_override({"hardtanh": ten_times}):
        found, _ = gradient(nn.ReLU6(), X)
    assert torch.equal(found, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    with gp.gradient_override({"relu6": ten_times}):
        found, _ = gradient(nn.Hardtanh(), X)
    assert torch.equal(found, torch.tensor([0.0, 1.0, 1.0, 0.0]))


def test_a_division_is_a_floor_division_only_where_it_rounds_down(gradient):
    with gp.gradient_override({"floor_divide": ten_times}):
        found, _ = gradient(lambda x: x / 2, X)
    assert torch.equal(found, torch.full((4,), 0.5))


@pytest.mark.parametrize("function", [torch.cumsum, torch.Tensor.cumsum, "cumsum"])
def test_any_other_torch_function_works_by_name_or_object(function, gradient):
    with gp.gradient_override({function: ten_times}):
        found, _ = gradient(lambda x: torch.cumsum(x, 0), X)
    assert torch.equal(found, torch.full((4,), 10.0))


def test_a_division_that_rounds_is_no_plain_division(gradient):
    with gp.gradient_override({"div": ten_times}):
        found, _ = gradient(lambda x: x / 2 + torch.div(x, 2, rounding_mode="floor"), X)
    assert torch.equal(found, torch.full((4,), 10.0))


@pytest.mark.parametrize("name", ["relu_", "torch.relu", "Tensor.relu_", "nn.functional.relu"])
def test_an_operation_may_be_named_by_any_of_its_spellings(name):
    assert resolve_operation(name) == resolve_operation("relu")


def test_an_operation_is_known_by_each_of_its_functions_and_can_be_pickled():
    for name in operation_names():
        operation = resolve_operation(name)
        assert pickle.loads(pickle.dumps(operation)) == operation
    assert resolve_operation(torch.Tensor.__floordiv__).name == "floor_divide"
    assert resolve_operation(torch.special.expit) == resolve_operation("sigmoid")


@pytest.mark.parametrize(("operator", "call"), [("//", lambda x: x // 2), (">", lambda x: (x > 0) * 1.0)])
def test_an_operator_s_sign_is_a_name_too(operator, call, gradient):
    with gp.gradient_override({operator: ten_times}):
        found, _ = gradient(call, X)
    assert torch.equal(found, torch.full((4,), 10.0))


def test_an_operation_of_a_library_of_one_s_own(gradient):
    @torch.library.custom_op("tests_flow::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    for key in (halved, torch.ops.tests_flow.halved, torch.ops.tests_flow.halved.default):
        with gp.gradient_override({key: "identity"}):
            found, _ = gradient(halved, X)
        assert torch.equal(found, torch.ones(4))


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (nn.ReLU, "'relu'"),
        (nn.ReLU(), "'relu'"),
        (math.floor, "'floor'"),
        (lambda x: x + 1, "never arrives"),
        (3, "name or a torch function"),
    ],
)
def test_what_would_never_be_met_is_refused(wrong, hint):
    with pytest.raises(gp.PolicyError, match=hint):
        gp.gradient_override({wrong: "identity"})


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("roud", "'round'"), ("ReLU", "'relu'"), ("flor_divide", "floor_divide"), ("init", "unknown")],
)
def test_an_unknown_operation_is_an_error_with_the_nearest_names(wrong, hint):
    with pytest.raises(gp.PolicyError, match=hint):
        gp.gradient_override({wrong: "identity"})


def test_every_python_function_of_torch_that_calls_an_overridable_one_is_listed_as_opaque():
    """A new release of torch may bring functions that hide others: this says which to add."""
    hidden = {"relu", "softmax", "tanh", "sigmoid", "gelu", "silu"}
    spelled = {f for name in hidden for f in resolve_operation(name).functions}
    for name, function in inspect.getmembers(F, inspect.isfunction):
        if function in spelled or name.startswith("_") or not hasattr(function, "__code__"):
            continue
        if hidden & set(function.__code__.co_names) and "has_torch_function" in str(
            function.__code__.co_names
        ):
            assert function in OPAQUE_CALLS, name
