"""Every spelling of every operation in compiled code: the gradient of eager mode, or an error."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

import gradpolicy as gp
from gradpolicy.flow.operations import operation_names, resolve_operation

X = torch.tensor([[0.2, 0.7], [0.4, 0.6]])
Y = torch.tensor([[0.3, 0.5], [0.9, 0.1]])
# What else a function of X may take; the first that it takes is taken.
ARGUMENTS = [
    *((), (0,), (Y,), (2.0,), (1,), (0, 1), (-1.0, 1.0), (Y, Y + 1), (0.1, 0.9)),
    *((X > 0.5, 0.5), (X > 0.5, Y)),
]
RANDOM = {"bernoulli", "categorical", "exponential", "geometric", "normal", "random", "uniform", "cauchy"}


def ten_times(grad, inputs, output):
    first = next(n for n, tensor in enumerate(inputs) if tensor.is_floating_point())
    return tuple(torch.full_like(t, 10.0) if n == first else None for n, t in enumerate(inputs))


def in_place_functions():
    return [name[:-1] for name in dir(torch) if name.endswith("_") and not name.startswith("_")]


def calls_of(name):
    """Every function that is a spelling of an operation, as functions of one tensor."""
    of_graphs = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    functions = [f for f in resolve_operation(name).functions if not isinstance(f, of_graphs)]
    return [call for f in sorted(functions, key=str) if (call := first_that_works(name, f))]


def first_that_works(name, function):
    for arguments in ARGUMENTS:

        def call(x, arguments=arguments):
            result = function(x * 1, *arguments)
            return result.to(x.dtype) if isinstance(result, torch.Tensor) else result[0]

        try:
            gradients(name, [call])
        except Exception:
            continue
        return call
    return None


def gradients(name, calls, compiled_by=None):
    def all_of_them(tensors):
        return [call(x) for call, x in zip(calls, tensors, strict=True)]

    run = torch.compile(all_of_them, backend=compiled_by, fullgraph=True) if compiled_by else all_of_them
    tensors = [X.clone().requires_grad_() for _ in calls]
    with gp.gradient_override({name: ten_times}):
        results = run(tensors)
    torch.stack([result.sum() for result in results]).sum().backward()
    return [tensor.grad for tensor in tensors]


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def agrees(name, calls, backend):
    """Return True if each call that compiles has the same gradient in compiled code."""
    expected = gradients(name, calls)
    try:
        found = gradients(name, calls, backend)
    except Exception:
        if len(calls) == 1:
            return True
        return all(agrees(name, [call], backend) for call in calls)
    return all(torch.allclose(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*operation_names(), *in_place_functions()} - RANDOM))
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_gives_every_spelling_the_gradient_of_eager_mode_or_refuses_it(name, backend):
    calls = calls_of(name)
    assert not calls or agrees(name, calls, backend)


def twice(x):
    """A function of a user's own that lets modes take its place."""
    if has_torch_function((x,)):
        return handle_torch_function(twice, (x,), x)
    return 2 * x


MISSED_BEFORE = {
    "relu": [
        lambda x: torch.relu_(torch.relu(x)),
        lambda x: F.relu_(F.relu(x)),
        lambda x: F.relu(x, inplace=False),
        lambda x: F.relu(x * 1, inplace=True),
        lambda x: nn.ReLU(inplace=True)(x * 1),
    ],
    "sigmoid": [F.sigmoid, nn.Sigmoid(), lambda x: torch.sigmoid_(x * 1)],
    "tanh": [F.tanh, nn.Tanh(), lambda x: torch.tanh_(x * 1)],
    "abs": [abs, operator.abs, lambda x: x.abs(), lambda x: torch.abs_(x * 1), lambda x: x.__abs__()],
    "pow": [lambda x: x**2, lambda x: 2**x, lambda x: (x * 1).__ipow__(2), lambda x: torch.pow(x, 2)],
    "sub": [lambda x: x - 1, lambda x: 1 - x, lambda x: torch.Tensor.__rsub__(x, 1)],
    "div": [lambda x: x / 2, lambda x: 1 / x, lambda x: torch.Tensor.__rdiv__(x, 1)],
    "floor_divide": [lambda x: x // 2, lambda x: 3 // x],
    "mul": [lambda x: x * x, lambda x: torch.mul(x, x), lambda x: 2 * x],
    "addcmul": [lambda x: torch.addcmul(x, x, x, value=2), lambda x: (x * 1).addcmul_(x, x)],
    "cat": [lambda x: torch.cat([x, x])],
    "getitem": [lambda x: x[:1], lambda x: x[..., None], lambda x: x[0, 1:], lambda x: x[[1, 0]]],
    "int": [lambda x: x.int().float(), lambda x: x.to(torch.int32).float()],
    "bool": [lambda x: x.bool().float(), lambda x: x.type(torch.bool).float()],
    twice: [twice],
}


@pytest.mark.parametrize("name", MISSED_BEFORE, ids=lambda name: getattr(name, "__name__", name))
def test_rules_act_in_compiled_code_on(name):
    calls = MISSED_BEFORE[name]
    torch.testing.assert_close(gradients(name, calls, "aot_eager"), gradients(name, calls))


def test_a_rule_on_a_function_in_place_acts_twice_where_it_is_called_twice():
    def times_five(grad, inputs, output):
        return 5 * grad

    x = torch.ones(2, requires_grad=True)
    with gp.gradient_override({"relu": times_five}):
        y = torch.compile(lambda x: torch.relu_(torch.relu(x)), backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    assert x.grad.tolist() == [25.0, 25.0]


def test_the_builtin_abs_is_as_it_was_where_no_rule_is():
    with gp.gradient_override({"abs": ten_times}):
        pass
    x = torch.tensor([-2.0, 3.0], requires_grad=True)
    torch.compile(abs, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert x.grad.tolist() == [-1.0, 1.0]
