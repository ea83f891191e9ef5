"""Rules that change an operation's own gradients. The references use plain autograd alone."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradpolicy as gp

# For each operation: its name, a call of it, and the shapes of its inputs.
CALLS = {
    "add": ("add", lambda a, b: a + b, [(3, 4), (4,)]),
    "add-in-place": ("add", lambda a, b: (1 * a).add_(b, alpha=2), [(3, 4), (4,)]),
    "sub-from-the-right": ("sub", lambda a, b: torch.sub(other=b, input=a), [(3, 4), (1, 4)]),
    "mul": ("mul", torch.mul, [(3, 4), (3, 1)]),
    "mul-operator-in-place": ("mul", lambda a, b: (a + 0).__imul__(b), [(3, 4), (3, 4)]),
    "linear": ("linear", F.linear, [(2, 3, 4), (5, 4), (5,)]),
    "matmul": ("matmul", lambda a, b: a @ b, [(2, 3, 4), (4, 5)]),
    "conv2d": ("conv2d", F.conv2d, [(2, 3, 5, 5), (4, 3, 2, 2), (4,)]),
    "cat": ("cat", lambda a, b: torch.cat([a, b], dim=1), [(3, 2), (3, 1)]),
    "stack-by-name": ("stack", lambda a, b: torch.stack(tensors=(a, b)), [(3,), (3,)]),
    "where": ("where", lambda a, b: a.where(torch.tensor([True, False, True]), b), [(3,), (3,)]),
    "relu-in-place": ("relu", lambda a: F.relu(2 * a, inplace=True), [(3, 4)]),
    "transpose": ("transpose", lambda a: a.transpose(0, 1), [(3, 4)]),
    "split": ("split", lambda a: torch.split(a, 2)[1] * 3, [(4, 2)]),
}


def clipped_norm(gradient):
    return gradient * min(1.0, 0.75 / gradient.norm().item())


# Each rule, and what becomes of each gradient.
RULES = {
    "scale": (gp.get_rule("scale", factor=0.25), lambda g: 0.25 * g),
    "norm": (gp.get_rule("clip_norm", norm=0.75), clipped_norm),
    "zero": (gp.get_rule("stop"), torch.zeros_like),
}
DOUBLED = replace(gp.get_rule("scale", factor=2.0), own=True)


def made(*shapes):
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.fixture
def gradients_with(gradients, as_module):
    """The gradients of a function as a module under a policy."""

    def of(policy, function, inputs, run=lambda model: model):
        with gp.install(model := as_module(function), [policy], strict=True):
            return gradients(run(model), *inputs)

    return of


def overridden(operation, rule, function):
    return gp.gradient_override({operation: rule})(function)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, None) for kind in RULES), pytest.param("scale", "aot_eager", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("call", CALLS)
def test_own_gradient_of_each_input(call, kind, backend, gradients):
    operation, function, shapes = CALLS[call]
    rule, change = RULES[kind]
    # Where the call stands in a longer expression, one factor belongs to the gradient of the input alone.
    inner = {"relu-in-place": 2.0}.get(call, 1.0)
    inputs = made(*shapes)
    expected = [inner * change(gradient / inner) for gradient in gradients(function, *inputs)]
    changed = overridden(operation, replace(rule, own=True), function)
    if backend:
        torch._dynamo.reset()
        changed = torch.compile(changed, backend=backend, fullgraph=True)
    found = gradients(changed, *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_tensor_passed_twice(gradients_with, run):
    x = torch.tensor([0.5, 3.0], dtype=torch.float64, requires_grad=True)
    (found,) = gradients_with(gp.Clip(value=1.0, ops=["mul"]), lambda a: a * a, [x], run)
    # The weights are -1 and 2.
    assert found.tolist() == [-1.0, 2.0]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (gp.Scale(3.0, ops=["linear"], argument="weight"), (1, 3, 1)),
        (gp.Scale(3.0, ops=["linear"], argument=0), (3, 1, 1)),
        (gp.Reverse(ops=["linear"], argument="bias"), (1, 1, -1)),
        (gp.Stop("zero", ops=["linear"], argument="weight"), (1, 0, 1)),
        (gp.Stop(ops=["linear"], argument="weight"), (1, None, 1)),
        (gp.Stop(ops=["linear"], argument=["weight", "bias"]), (1, None, None)),
        (gp.Scale(3.0, ops=["linear"], argument=[0, 2]), (3, 1, 3)),
    ],
)
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.mostly_slow)])
def test_named_argument(policy, expected, compiles, gradients, gradients_with, compiled):
    inputs = made((2, 4), (5, 4), (5,))
    plain = gradients(F.linear, *inputs)
    found = gradients_with(policy, F.linear, inputs, compiled if compiles else lambda model: model)
    for factor, one, other in zip(expected, found, plain, strict=True):
        assert one is None if factor is None else torch.equal(one, factor * other)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            gp.Stop(ops="linear", argument="weight"),
            gp.Scale(3.0, ops="linear", argument="bias"),
            (1, None, 3),
        ),
        (gp.Scale(2.0, ops="linear", argument=[0, 2]), gp.Reverse(ops="linear", argument=1), (2, -1, 2)),
    ],
)
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.mostly_slow)])
def test_policies_on_different_arguments_of_an_operation(
    first, second, expected, compiles, gradients, as_module, compiled
):
    inputs = made((2, 4), (5, 4), (5,))
    plain = gradients(F.linear, *inputs)
    model = as_module(F.linear)
    with gp.install(model, [first, second], strict=True):
        found = gradients(compiled(model) if compiles else model, *inputs)
    for factor, one, other in zip(expected, found, plain, strict=True):
        assert one is None if factor is None else torch.equal(one, factor * other)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (gp.Scale(2.0, ops="mul", argument=["input", "other"]), gp.Scale(3.0, ops="mul", argument="other")),
        (gp.Scale(2.0, ops="mul", argument="input"), gp.Scale(3.0, ops="mul", argument=1)),
        (gp.Scale(2.0, ops="mul", argument="input"), gp.Scale(3.0, ops="mul")),
        (
            gp.StraightThrough(ops="mul", argument="input"),
            gp.StraightThrough("tanh", ops="mul", argument="other"),
        ),
    ],
)
def test_policies_on_one_argument_of_an_operation_are_refused(first, second, as_module):
    with pytest.raises(gp.PolicyError, match="both have a rule for operation 'mul'"):
        gp.install(as_module(torch.mul), [first, second])


def test_attention_with_a_fixed_pattern(gradients, as_module):
    inputs = made((2, 3, 4), (2, 3, 4), (2, 3, 4))
    attend = F.scaled_dot_product_attention
    policy = gp.Stop(ops=["scaled_dot_product_attention"], argument=["query", "key"])
    with gp.install(model := as_module(lambda q, k, v: attend(query=q, value=v, key=k)), [policy]):
        query, key, value = gradients(model, *inputs)
    assert query is None
    assert key is None
    torch.testing.assert_close(value, gradients(attend, *inputs)[2])


@pytest.mark.parametrize(
    ("where", "function", "shapes", "message"),
    [
        (
            {"ops": ["linear"], "argument": "wieght"},
            F.linear,
            [(2, 4), (5, 4)],
            "operation 'linear': unknown argument 'wieght'; did you mean 'weight'",
        ),
        (
            {"ops": ["mul"], "argument": "other"},
            lambda x: x * x,
            [(2,)],
            "argument 'other' and another one are given the same tensor",
        ),
    ],
)
def test_what_cannot_be_changed_is_refused(where, function, shapes, message, as_module):
    with (
        gp.install(model := as_module(function), [gp.Scale(3.0, **where)]),
        pytest.raises(gp.PolicyError, match=message),
    ):
        model(*made(*shapes))


@pytest.mark.parametrize(
    "rule", ["identity", "tanh", gp.get_rule("scale", factor=2.0), lambda g, i, o: 2 * g]
)
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.mostly_slow)])
def test_one_gradient_for_several_inputs_is_refused(rule, compiles, gradients, as_module):
    torch._dynamo.reset()
    function = overridden("mul", rule, torch.mul)
    run = torch.compile(function, backend="aot_eager") if compiles else function
    with pytest.raises(gp.PolicyError, match=r"operation 'mul'.* one gradient .* for 2 inputs .* tuple"):
        gradients(run, *made((3,), (3,)))
    with (
        gp.install(model := as_module(torch.mul), [gp.UseRule(rule, ops=["mul"])]),
        pytest.raises(gp.PolicyError, match=r"or name the input that the gradient is for \(argument=…\)"),
    ):
        gradients(model, *made((3,), (3,)))


class TestAFunctionOfTheOwnGradients:
    def test_gets_a_tuple_with_none(self, gradients, gradients_with):
        seen = []

        def swapped(own, inputs, output):
            seen.append(own)
            return own[0], own[2], own[1]

        def choice(a, b):
            return torch.where(torch.tensor([True, False, True]), a, b)

        inputs = made((3,), (3,))
        found = gradients_with(gp.UseRule(swapped, ops=["where"], own=True), choice, inputs)
        assert isinstance(seen[0], tuple)
        assert seen[0][0] is None
        torch.testing.assert_close(found, gradients(choice, *inputs)[::-1])

    def test_it_may_read_the_inputs(self, gradients, gradients_with, run):
        def weighted(own, inputs, output, *, power):
            return tuple(one * tensor.abs() ** power for one, tensor in zip(own, inputs, strict=True))

        inputs = made((3, 4), (4,))
        policy = gp.UseRule(weighted, parameters={"power": 2}, ops=["mul"], own=True)
        found = gradients_with(policy, torch.mul, inputs, run)
        plain = gradients(torch.mul, *inputs)
        expected = [one * tensor.detach() ** 2 for one, tensor in zip(plain, inputs, strict=True)]
        torch.testing.assert_close(found, expected)

    def test_reading_the_output(self):
        weighted = gp.Rule("weighted", lambda own, inputs, output: (own[0] * output, own[1]), own=True)
        x, y = made((3,), (3,))
        z = overridden("mul", weighted, torch.mul)(x, y)
        with pytest.raises(gp.PolicyError, match="has no second derivatives"):
            torch.autograd.grad((z**2).sum(), x, create_graph=True)
        (first,) = torch.autograd.grad((z**2).sum(), x)
        # own = 2 z y and z = x y, so the gradient is 2 z² y.
        torch.testing.assert_close(first, 2 * x**2 * y**3)
        written = overridden("add", weighted, torch.add)(x, y).mul_(2)
        with pytest.raises(gp.PolicyError, match="must not be changed in place"):
            written.sum().backward()

    def test_reading_the_output_is_refused_in_compiled_code(self, gradients, compiled):
        weighted = gp.Rule("weighted", lambda own, inputs, output: (own[0] * output, own[1]), own=True)
        function, inputs = overridden("mul", weighted, torch.mul), made((3,), (3,))
        # Without fullgraph it is left to eager mode.
        found = gradients(compiled(function, fullgraph=False), *inputs)
        torch.testing.assert_close(found, gradients(function, *inputs))
        torch._dynamo.reset()
        with pytest.raises(Exception, match="cannot read its output in code that is"):
            gradients(compiled(function), *inputs)

    def test_returns_one_gradient_or_a_tuple(self, gradients):
        x, constant = made((3,), (3,))
        rule = gp.Rule("doubled", lambda own, inputs, output: 2 * own[1], own=True)
        function = lambda a: torch.sub(constant.detach(), a)  # noqa: E731
        (found,) = gradients(overridden("sub", rule, function), x)
        torch.testing.assert_close(found, 2 * gradients(function, x)[0])
        short = gp.Rule("one", lambda own, inputs, output: own[:1], own=True)
        with pytest.raises(gp.PolicyError, match=r"rule 'one' at operation 'mul': returned 1 gradients"):
            gradients(overridden("mul", short, torch.mul), *made((3,), (3,)))

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda rule: gp.UseRule("tanh", ops=["mul"], own=True), "rule 'tanh' replaces a gradient"),
            (lambda rule: gp.UseRule("torch.sin", ops=["mul"], own=True), "'derivative of sin' replaces a"),
            (lambda rule: gp.UseRule(rule.function, modules="a", own=True), r"UseRule\.own: goes with ops="),
            (
                lambda rule: gp.StraightThrough(rule, modules="a"),
                r"StraightThrough: rule 'r' changes operations' own gradients .* \(ops=\)",
            ),
            (
                lambda rule: gp.apply(rule, torch.abs, torch.ones(1)),
                r"apply: rule 'r' changes an operation's own gradients",
            ),
            (
                lambda rule: gp.gradcheck_rule(rule, torch.abs, torch.ones(1)),
                r"gradcheck_rule: rule 'r' changes an operation's own gradients",
            ),
            (lambda rule: gp.Guided(argument="input"), r"Guided\.argument: rule 'guided_relu' filters"),
        ],
    )
    def test_refused_without_own_gradients(self, make, message):
        with pytest.raises(gp.PolicyError, match=message):
            make(gp.Rule("r", lambda own, inputs, output: own, own=True))


class TestALearntFactor:
    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize(
        "where", [{"modules": "*", "at": "output"}, {"ops": ["mul"]}, {"params": "weight"}]
    )
    @pytest.mark.parametrize("value", [0.5, 0.0])
    def test_gradient_of_the_factor(self, where, sign, value):
        class Product(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.tensor([2.0, -3.0], dtype=torch.float64))

            def forward(self, x):
                return self.weight * x

        model, x = Product(), torch.tensor([0.5, 4.0], dtype=torch.float64)
        factor = nn.Parameter(torch.tensor(value, dtype=torch.float64))
        policy = (gp.Scale if sign == 1 else gp.Reverse)(factor, **where)
        with gp.install(model, [policy], strict=True):
            (found,) = torch.autograd.grad((model(x) ** 2).sum(), model.weight, create_graph=True)
            (found**2).sum().backward()
        by_hand = nn.Parameter(factor.detach().clone())
        (plain,) = torch.autograd.grad(((model.weight * x) ** 2).sum(), model.weight, create_graph=True)
        expected = sign * by_hand * plain
        torch.testing.assert_close(found, expected)
        (slope,) = torch.autograd.grad((expected**2).sum(), by_hand)
        torch.testing.assert_close(factor.grad, slope)

    def test_compiled_code_reads_it_anew(self, as_module, compiled, gradient):
        factor, x = nn.Parameter(torch.tensor(3.0)), torch.ones(2)
        with gp.install(model := as_module(torch.exp), [gp.Scale(factor, ops=["exp"])]):
            run = compiled(model)
            for value in (3.0, -1.0):
                with torch.no_grad():
                    factor.fill_(value)
                torch.testing.assert_close(gradient(run, x)[0], value * torch.exp(x))

    def test_wrong_factors(self):
        for wrong in (torch.tensor(2), "factor"):
            with pytest.raises(gp.PolicyError, match=r"Scale\.factor: expected a number, or .* tensor"):
                gp.Scale(wrong, modules="*")
        assert "factor=Parameter of shape ()" in repr(gp.Scale(nn.Parameter(torch.tensor(2.0)), modules="*"))
