"""Rules that change an operation's own gradients. The references use plain autograd alone."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradpolicy as gp
from gradpolicy.rules import get_rule

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


def clipped_norm(gradient, norm):
    return gradient * min(1.0, norm / gradient.norm().item())


# For each policy: how it is made, the rule that says the same, and what becomes of each gradient.
POLICIES = {
    "scale": (lambda ops: gp.Scale(0.25, ops=ops), get_rule("scale", factor=0.25), lambda g: 0.25 * g),
    "reverse": (lambda ops: gp.Reverse(2.0, ops=ops), get_rule("reverse", factor=2.0), lambda g: -2 * g),
    "clip": (
        lambda ops: gp.Clip(value=0.5, ops=ops),
        get_rule("clip_value", value=0.5),
        lambda g: g.clamp(-0.5, 0.5),
    ),
    "norm": (
        lambda ops: gp.Clip(norm=0.75, ops=ops),
        get_rule("clip_norm", norm=0.75),
        lambda g: clipped_norm(g, 0.75),
    ),
    "zero": (lambda ops: gp.Stop("zero", ops=ops), get_rule("stop"), torch.zeros_like),
}


class Calls(nn.Module):
    """A module around a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def gradients(function, inputs):
    """The gradients of a weighted sum of what a function gives."""
    points = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    result = function(*points)
    (result * torch.linspace(-1.0, 2.0, result.numel(), dtype=result.dtype).view_as(result)).sum().backward()
    return [point.grad for point in points]


def made(shapes):
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("kind", "where", "compiled"),
    [
        *((kind, where, False) for kind in POLICIES for where in ("installed", "override")),
        pytest.param("clip", "installed", True, marks=pytest.mark.mostly_slow),
        pytest.param("scale", "override", True, marks=pytest.mark.mostly_slow),
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_each_input_gets_the_operation_s_own_gradient_changed(call, kind, where, compiled):
    operation, function, shapes = CALLS[call]
    policy, rule, change = POLICIES[kind]
    # Where the call stands in a longer expression, one factor belongs to the gradient of the input alone.
    inner = {"relu-in-place": 2.0}.get(call, 1.0)
    inputs = made(shapes)
    plain = gradients(function, inputs)
    expected = [inner * change(gradient / inner) for gradient in plain]
    torch._dynamo.reset()
    if where == "installed":
        model = Calls(function)
        with gp.install(model, [policy([operation])], strict=True):
            found = gradients(
                torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model, inputs
            )
    else:

        def overridden(*points):
            with gp.gradient_override({operation: replace(rule, own=True)}):
                return function(*points)

        found = gradients(
            torch.compile(overridden, backend="aot_eager", fullgraph=True) if compiled else overridden, inputs
        )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, id="compiled")])
def test_a_tensor_that_is_given_twice_gets_what_each_place_gets(compiled):
    x = torch.tensor([0.5, 3.0], dtype=torch.float64, requires_grad=True)
    model = Calls(lambda a: a * a)
    with gp.install(model, [gp.Clip(value=1.0, ops=["mul"])], strict=True):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, id="compiled")])
@pytest.mark.parametrize("trains", [0, 1])
def test_an_input_that_needs_no_gradient_gets_none(trains, compiled):
    inputs = made([(3,), (3,)])
    inputs[1 - trains].requires_grad_(False)
    model = Calls(torch.mul)
    with gp.install(model, [gp.Scale(3.0, ops=["mul"])], strict=True):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        found = gradients(run, inputs)
    assert found[1 - trains] is None
    torch.testing.assert_close(found[trains], 3 * gradients(torch.mul, inputs)[trains])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, id="compiled")])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (gp.Scale(3.0, ops=["linear"], argument="weight"), (1, 3, 1)),
        (gp.Scale(3.0, ops=["linear"], argument=0), (3, 1, 1)),
        (gp.Reverse(ops=["linear"], argument="bias"), (1, 1, -1)),
        (gp.Stop("zero", ops=["linear"], argument="weight"), (1, 0, 1)),
        (gp.Stop(ops=["linear"], argument="weight"), (1, None, 1)),
    ],
)
def test_an_argument_of_the_operation_may_be_named_and_the_others_keep_their_own(policy, expected, compiled):
    inputs = made([(2, 4), (5, 4), (5,)])
    plain = gradients(F.linear, inputs)
    with gp.install(model := Calls(F.linear), [policy], strict=True):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        found = gradients(run, inputs)
    for factor, one, other in zip(expected, found, plain, strict=True):
        assert one is None if factor is None else torch.equal(one, factor * other)


def test_naming_an_argument_means_nothing_for_what_filters_the_incoming_gradient():
    with pytest.raises(gp.PolicyError, match=r"Guided\.argument: rule 'guided_relu' filters"):
        gp.Guided(argument="input")


def test_an_operation_without_a_result_is_refused():
    def write(x, y):
        whole = 1 * x
        whole[0] = y
        return whole

    with (
        gp.install(model := Calls(write), [gp.Scale(2.0, ops=["setitem"])]),
        pytest.raises(gp.PolicyError, match="operation 'setitem' gives no result"),
    ):
        model(*made([(3,), ()]))


def test_mixed_precision_leaves_gradients_changed():
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    plain = layer.weight.grad.clone()
    layer.zero_grad()
    with (
        gp.install(layer, [gp.Scale(4.0, ops=["linear"])], strict=True),
        torch.autocast("cpu", torch.bfloat16),
    ):
        layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, 4 * plain)


def test_a_rule_may_replace_the_gradient_of_the_one_argument_that_is_named():
    x, weight = made([(2, 3), (3, 3)])
    policy = gp.StraightThrough(ops=["linear"], argument="input")
    with gp.install(model := Calls(F.linear), [policy], strict=True):
        found = gradients(model, [x, weight])
    assert torch.equal(found[0], torch.linspace(-1.0, 2.0, 6, dtype=torch.float64).view(2, 3))
    assert found[1] is None


@pytest.mark.parametrize(
    ("argument", "message"),
    [("wieght", "operation 'linear': unknown argument 'wieght'; did you mean 'weight'"), (7, "argument '7'")],
)
def test_an_argument_that_the_operation_does_not_have_is_refused(argument, message):
    with (
        gp.install(model := Calls(F.linear), [gp.Scale(3.0, ops=["linear"], argument=argument)]),
        pytest.raises(gp.PolicyError, match=message),
    ):
        model(*made([(2, 4), (5, 4)]))


def test_an_argument_whose_tensor_is_given_twice_is_refused():
    with (
        gp.install(model := Calls(lambda x: x * x), [gp.Scale(3.0, ops=["mul"], argument="other")]),
        pytest.raises(gp.PolicyError, match="argument 'other' and another one are given the same tensor"),
    ):
        model(*made([(2,)]))


@pytest.mark.parametrize("rule", ["identity", "tanh", get_rule("scale", factor=2.0), lambda g, i, o: 2 * g])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, id="compiled")])
def test_a_rule_that_replaces_one_gradient_is_refused_where_several_inputs_need_one(rule, compiled):
    def overridden(a, b):
        with gp.gradient_override({"mul": rule}):
            return torch.mul(a, b)

    torch._dynamo.reset()
    run = torch.compile(overridden, backend="aot_eager") if compiled else overridden
    with pytest.raises(gp.PolicyError, match=r"operation 'mul'.* one gradient .* for 2 inputs .* tuple"):
        gradients(run, made([(3,), (3,)]))
    with (
        gp.install(model := Calls(torch.mul), [gp.UseRule(rule, ops=["mul"])]),
        pytest.raises(gp.PolicyError, match=r"or name the input that the gradient is for \(argument=…\)"),
    ):
        gradients(model, made([(3,), (3,)]))


def test_a_rule_that_returns_a_tuple_says_what_each_input_gets():
    inputs = made([(3,), (3,)])
    with gp.gradient_override({"sub": lambda grad, inputs, output: (2 * grad, None)}):
        found = gradients(torch.sub, inputs)
    assert torch.equal(found[0], 2 * torch.linspace(-1.0, 2.0, 3, dtype=torch.float64))
    assert found[1] is None


def test_scale_by_name_stays_a_straight_through_times_a_factor():
    x = torch.randn(3, dtype=torch.float64)
    with gp.gradient_override({"sign": get_rule("scale", factor=0.5)}):
        found = gradients(torch.sign, [x.requires_grad_()])
    assert torch.equal(found[0], 0.5 * torch.linspace(-1.0, 2.0, 3, dtype=torch.float64))


class TestAFunctionOfTheOwnGradients:
    def test_it_gets_all_of_them_as_a_tuple(self):
        def swapped(own, inputs, output):
            assert isinstance(own, tuple)
            return own[1], own[0]

        inputs = made([(3,), (3,)])
        with gp.install(model := Calls(torch.mul), [gp.UseRule(swapped, ops=["mul"], own=True)], strict=True):
            found = gradients(model, inputs)
        assert torch.equal(torch.stack(found), torch.stack(gradients(torch.mul, inputs)[::-1]))

    def test_it_gets_none_for_an_input_that_needs_no_gradient(self):
        seen = []

        def look(own, inputs, output):
            seen.append(own)
            return own

        condition = torch.tensor([True, False, True])
        inputs = made([(3,), (3,)])
        with gp.install(
            model := Calls(lambda a, b: torch.where(condition, a, b)),
            [gp.UseRule(look, ops=["where"], own=True)],
            strict=True,
        ):
            found = gradients(model, inputs)
        assert seen[0][0] is None
        assert [gradient.tolist() for gradient in seen[0][1:]] == [gradient.tolist() for gradient in found]

    @pytest.mark.parametrize("compiled", [False, pytest.param(True, id="compiled")])
    def test_it_may_read_the_inputs(self, compiled):
        def weighted(own, inputs, output, *, power):
            return tuple(one * tensor.abs() ** power for one, tensor in zip(own, inputs, strict=True))

        inputs = made([(3, 4), (4,)])
        policy = gp.UseRule(weighted, parameters={"power": 2}, ops=["mul"], own=True)
        with gp.install(model := Calls(torch.mul), [policy], strict=True):
            run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            found = gradients(run, inputs)
        plain = gradients(torch.mul, inputs)
        expected = [one * tensor.detach() ** 2 for one, tensor in zip(plain, inputs, strict=True)]
        torch.testing.assert_close(found, expected)

    def test_it_may_read_the_output_and_be_differentiated_again(self):
        def weighted(own, inputs, output):
            return own[0] * output, own[1]

        x, y = made([(3,), (3,)])
        with gp.gradient_override({"mul": gp.Rule("weighted", weighted, own=True)}):
            z = torch.mul(x, y)
        (first,) = torch.autograd.grad((z**2).sum(), x, create_graph=True)
        # own = 2 z y and z = x y, so the gradient is 2 z² y.
        torch.testing.assert_close(first, 2 * x**2 * y**3)

    def test_an_output_that_was_written_to_is_no_longer_read(self):
        def weighted(own, inputs, output):
            return own[0] * output, own[1]

        x, y = made([(3,), (3,)])
        with gp.gradient_override({"add": gp.Rule("weighted", weighted, own=True)}):
            z = torch.add(x, y)
        z.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()

    def test_reading_the_output_is_refused_in_compiled_code(self):
        rule = gp.Rule("weighted", lambda own, inputs, output: (own[0] * output, own[1]), own=True)

        def overridden(a, b):
            with gp.gradient_override({"mul": rule}):
                return torch.mul(a, b)

        torch._dynamo.reset()
        inputs = made([(3,), (3,)])
        # Without fullgraph it is left to eager mode.
        found = gradients(torch.compile(overridden, backend="aot_eager"), inputs)
        torch.testing.assert_close(found, gradients(overridden, inputs))
        torch._dynamo.reset()
        with pytest.raises(Exception, match="cannot read its output in code that is"):
            gradients(torch.compile(overridden, backend="aot_eager", fullgraph=True), inputs)

    def test_it_may_return_one_gradient_where_one_input_needs_one(self):
        x, constant = made([(3,), (3,)])
        rule = gp.Rule("doubled", lambda own, inputs, output: 2 * own[1], own=True)
        with gp.gradient_override({"sub": rule}):
            found = gradients(lambda a: torch.sub(constant.detach(), a), [x])
        torch.testing.assert_close(found[0], 2 * gradients(lambda a: constant.detach() - a, [x])[0])

    def test_a_wrong_number_of_gradients_is_named(self):
        with (
            gp.gradient_override({"mul": gp.Rule("one", lambda own, inputs, output: own[:1], own=True)}),
            pytest.raises(gp.PolicyError, match=r"rule 'one' at operation 'mul': returned 1 gradients"),
        ):
            gradients(torch.mul, made([(3,), (3,)]))

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: gp.UseRule("tanh", ops=["mul"], own=True), "rule 'tanh' replaces a gradient"),
            (
                lambda: gp.UseRule("torch.sin", ops=["mul"], own=True),
                "'derivative of sin' replaces a gradient",
            ),
            (lambda: gp.UseRule(lambda o, i, y: o, modules="a", own=True), r"UseRule\.own: goes with ops="),
            (
                lambda: gp.StraightThrough(gp.Rule("r", lambda o, i, y: o, own=True), modules="a"),
                r"StraightThrough: rule 'r' changes operations' own gradients .* \(ops=\)",
            ),
            (
                lambda: gp.apply(gp.Rule("r", lambda o, i, y: o, own=True), torch.abs, torch.ones(1)),
                r"apply: rule 'r' changes an operation's own gradients",
            ),
            (
                lambda: gp.gradcheck_rule(
                    gp.Rule("r", lambda o, i, y: o, own=True), torch.abs, torch.ones(1)
                ),
                r"gradcheck_rule: rule 'r' changes an operation's own gradients",
            ),
        ],
    )
    def test_it_is_refused_where_there_are_no_own_gradients(self, make, message):
        with pytest.raises(gp.PolicyError, match=message):
            make()


@pytest.mark.parametrize("reads", [False, True])
def test_a_checkpoint_runs_the_operation_again(reads):
    def weighted(own, inputs, output):
        return (own[0] * inputs[0], own[1]) if reads else (2 * own[0], own[1])

    policy = gp.UseRule(weighted if reads else get_rule("scale", factor=2.0), ops=["mul"], own=True)
    inputs = made([(3,), (3,)])
    with gp.install(model := Calls(torch.mul), [policy], strict=True):
        plain = gradients(model, inputs)
        again = gradients(lambda *points: checkpoint(model, *points, use_reentrant=False), inputs)
    torch.testing.assert_close(again, plain)


def test_a_block_that_has_ended_leaves_a_checkpoint_s_gradients_changed():
    inputs = made([(3,), (3,)])

    def overridden(*points):
        with gp.gradient_override({"mul": replace(get_rule("scale", factor=2.0), own=True)}):
            return checkpoint(lambda a, b: torch.sin(torch.mul(a, b)), *points, use_reentrant=False)

    expected = [2 * gradient for gradient in gradients(lambda a, b: torch.sin(a * b), inputs)]
    torch.testing.assert_close(gradients(overridden, inputs), expected)


def test_it_holds_under_torch_func():
    x, y = made([(4, 3), (4, 3)])
    rule = replace(get_rule("scale", factor=2.0), own=True)

    def product(a, b):
        with gp.gradient_override({"mul": rule}):
            return torch.mul(a, b).sum()

    found = torch.func.vmap(torch.func.grad(product, argnums=(0, 1)))(x.detach(), y.detach())
    torch.testing.assert_close(found, (2 * y.detach(), 2 * x.detach()))
    with pytest.raises(gp.PolicyError, match="has no forward-mode derivative"):
        torch.func.jvp(product, (x.detach(), y.detach()), (x.detach(), y.detach()))


def test_the_number_that_held_in_the_forward_pass_holds_in_the_backward_pass():
    x = torch.ones(3, requires_grad=True)
    with gp.install(model := Calls(torch.exp), [gp.Scale(lambda step: 1.0 + step, ops=["exp"])]) as installed:
        y = model(x)
        installed.update(phase="fit", step=4, epoch=0)
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.exp(x).detach())
        x.grad = None
        model(x).sum().backward()
        torch.testing.assert_close(x.grad, 5 * torch.exp(x).detach())


def test_a_filter_uses_the_number_that_held_in_the_forward_pass():
    def times(grad, *, factor):
        return factor * grad

    def also(grad, inputs, output, *, factor):
        return factor * grad

    rule = gp.Rule("times", also, {"factor": lambda step: 1.0 + step}, gradient_filter=times)
    x = torch.ones(3, requires_grad=True)
    with gp.install(model := Calls(torch.exp), [gp.UseRule(rule, ops=["exp"])]) as installed:
        y = model(x)
        installed.update(phase="fit", step=4, epoch=0)
        y.sum().backward()
    torch.testing.assert_close(x.grad, torch.exp(x).detach())


def test_a_copied_rule_keeps_what_was_changed():
    scale = replace(get_rule("scale", factor=2.0), own=True)
    guided = replace(get_rule("guided_relu"), gradient_filter=None)
    for rule in (scale, guided):
        assert copy.deepcopy(rule) == pickle.loads(pickle.dumps(rule)) == rule


@pytest.mark.parametrize("argument", [None, "x"])
def test_a_copied_model_keeps_a_rule_through_a_module_of_two_inputs(argument):
    class Sum(nn.Module):
        def forward(self, x, y):
            return torch.relu(x + y)

    model = nn.ModuleList([Sum()])
    policy = gp.UseRule("guided_relu", modules="0", at="through", argument=argument)
    x, y = made([(3,), (3,)])
    y.requires_grad_(argument is not None)
    with gp.install(model, [policy]):
        for one in (model, copy.deepcopy(model)):
            x.grad = y.grad = None
            one[0](x, y).sum().backward()
            assert torch.equal(x.grad, (x + y > 0).double())
            assert y.grad is None


def test_a_copied_model_keeps_changed_gradients():
    layer = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    with gp.install(layer, [gp.Scale(2.0, ops=["linear"])]):
        layer(x).sum().backward()
        copied = copy.deepcopy(layer)
        copied.zero_grad()
        copied(x).sum().backward()
    torch.testing.assert_close(copied.weight.grad, layer.weight.grad)
    torch.testing.assert_close(copied.weight.grad, 2 * x.sum(0).expand(2, 3))


class TestALearntFactor:
    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize(
        "where", [{"modules": "*", "at": "output"}, {"ops": ["mul"]}, {"params": "weight"}]
    )
    @pytest.mark.parametrize("value", [0.5, 0.0])
    def test_a_loss_of_gradients_reaches_it_as_in_plain_autograd(self, where, sign, value):
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

    def test_its_value_in_the_forward_pass_counts_and_the_loss_itself_does_not_reach_it(self):
        factor = nn.Parameter(torch.tensor(3.0))
        x = torch.ones(2, requires_grad=True)
        for ops in (["exp"], None):
            where = {"ops": ops} if ops else {"modules": "*"}
            with gp.install(model := Calls(torch.exp), [gp.Scale(factor, **where)]):
                y = model(x)
                with torch.no_grad():
                    factor.add_(1)
                y.sum().backward()
            torch.testing.assert_close(x.grad, (factor.item() - 1) * torch.exp(x).detach())
            x.grad = None
        assert factor.grad is None

    def test_a_factor_for_each_channel(self):
        factor = nn.Parameter(torch.tensor([1.0, 0.0, -2.0]))
        x = torch.ones(2, 3, requires_grad=True)
        with gp.install(model := nn.Sequential(nn.Identity()), [gp.Scale(factor, modules="0")], strict=True):
            model(x).sum().backward()
        assert torch.equal(x.grad, factor.detach().expand(2, 3))

    def test_compiled_code_reads_it_anew(self):
        factor = nn.Parameter(torch.tensor(3.0))
        x = torch.ones(2, requires_grad=True)
        with gp.install(model := Calls(torch.exp), [gp.Scale(factor, ops=["exp"])]):
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
            for value in (3.0, -1.0):
                with torch.no_grad():
                    factor.fill_(value)
                x.grad = None
                run(x).sum().backward()
                torch.testing.assert_close(x.grad, value * torch.exp(x).detach())

    def test_a_copied_model_has_a_factor_of_its_own(self):
        model = nn.Sequential(nn.Linear(2, 2))
        model.factor = nn.Parameter(torch.tensor(2.0))
        x = torch.ones(1, 2, requires_grad=True)
        with gp.install(model, [gp.Scale(model.factor, modules="0")]):
            copied = copy.deepcopy(model)
            with torch.no_grad():
                copied.factor.zero_()
            copied(x).sum().backward()
            assert torch.equal(x.grad, torch.zeros(1, 2))
            model(x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * model[0].weight.detach().sum(0, keepdim=True))

    def test_whole_numbers_and_names_are_refused_and_the_plan_shows_no_values(self):
        for wrong in (torch.tensor(2), "factor"):
            with pytest.raises(gp.PolicyError, match=r"Scale\.factor: must be a number, or .* tensor"):
                gp.Scale(wrong, modules="*")
        assert "factor=Parameter of shape ()" in repr(gp.Scale(nn.Parameter(torch.tensor(2.0)), modules="*"))
