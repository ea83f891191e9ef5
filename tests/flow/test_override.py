import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

import gradpolicy as gp

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
ROUNDINGS = {
    "function": torch.round,
    "method": torch.Tensor.round,
    "in place": lambda x: (x * 1).round_(),
    "keywords": lambda x: torch.round(input=x, decimals=0),
    "special": torch.special.round,
}


def seven_times(grad, inputs, output):
    return 7.0 * grad


def cube(grad, inputs, output):
    """Differentiable, so that the gradient has a gradient."""
    return grad * inputs[0] ** 3


def test_ends_with_its_block_but_not_before_backward():
    x = torch.randn(5, requires_grad=True)
    with contextlib.suppress(KeyError), gp.gradient_override({"round": "identity"}):
        inside = torch.round(x)
        raise KeyError
    outside = torch.round(x)
    assert torch.equal(torch.autograd.grad(inside.sum(), x)[0], torch.ones(5))
    assert torch.equal(torch.autograd.grad(outside.sum(), x)[0], torch.zeros(5))


def test_block_entered_twice_and_on_threads(gradient):
    block = gp.gradient_override({"round": seven_times})
    ready = threading.Barrier(2)

    def rounded(x):
        with block, block:
            ready.wait(10)
            result = torch.round(x)
        return result + torch.round(x)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: gradient(rounded, torch.randn(3))[0], range(2)))
    assert all(torch.equal(found, torch.full((3,), 7.0)) for found in results)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("identity", lambda x: torch.ones_like(x)),
        (seven_times, lambda x: torch.full_like(x, 7.0)),
        (gp.get_rule("scale", factor=3.0), lambda x: torch.full_like(x, 3.0)),
        (torch.tanh, lambda x: 1 - torch.tanh(x) ** 2),
        ("softplus", lambda x: torch.sigmoid(x)),
        (F.gelu, lambda x: torch.func.vmap(torch.func.grad(F.gelu))(x)),
    ],
)
def test_values_are_rules_or_operations(value, expected, gradient):
    x = torch.randn(6)
    with gp.gradient_override({"sign": value}):
        found, result = gradient(torch.sign, x)
    torch.testing.assert_close(found, expected(x))
    assert torch.equal(result, torch.sign(x))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"round": "identiti"}, "identity"),
        ({"round": "scale"}, "factor"),
        ({"round": "identity", torch.round: "stop"}, "twice"),
        ({3: "identity"}, "operation"),
        ({"round": 3}, "rule"),
        ("round", "dict"),
    ],
)
def test_a_wrong_override_is_refused(overrides, message):
    with pytest.raises(gp.PolicyError, match=message):
        gp.gradient_override(overrides)


@settings(max_examples=40)
@given(
    shape=SHAPES,
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    spelling=st.sampled_from(sorted(ROUNDINGS)),
    transposed=st.booleans(),
    rule=st.sampled_from(["identity", "tanh", "clip_value"]),
)
def test_shapes_dtypes_and_layouts_change_nothing(shape, dtype, spelling, transposed, rule):
    x = torch.randn(shape, dtype=torch.float32).to(dtype)
    x = (x.mT if transposed and x.dim() > 1 else x).detach().requires_grad_()
    chosen = gp.get_rule(rule, **({"value": 0.5} if rule == "clip_value" else {}))
    with gp.gradient_override({"round": chosen}):
        y = ROUNDINGS[spelling](x)
    y.sum().backward()
    expected = chosen(torch.ones_like(x), (x.detach(),), torch.round(x.detach()), gp.Call("round"))
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, expected)


@settings(max_examples=30)
@given(names=st.lists(st.sampled_from(["round", "floor", "relu", None]), min_size=1, max_size=5))
def test_innermost_block_wins(names):
    expected = {"round": 0.0, "floor": 0.0, "relu": 1.0}
    x = torch.full((2,), 0.6, requires_grad=True)
    with torch.enable_grad():
        entered = []
        for depth, name in enumerate(names, start=1):
            overrides = {name: gp.get_rule("scale", factor=10.0 * depth)} if name else {}
            entered.append(gp.gradient_override(overrides).__enter__())
            expected |= {name: 10.0 * depth} if name else {}
        results = {"round": torch.round(x), "floor": x.floor(), "relu": F.relu(x)}
        for block in reversed(entered):
            block.__exit__(None, None, None)
    for name, result in results.items():
        assert torch.equal(torch.autograd.grad(result.sum(), x)[0], torch.full((2,), expected[name]))


@pytest.mark.parametrize("rule", ["guided_relu", cube])
def test_double_backward(rule):
    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    with gp.gradient_override({"relu": rule}):
        y = (F.relu(x) ** 2).sum()
        # Inside the block too: what a rule computes with is no operation of the block's.
        (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    if rule == "guided_relu":
        expected = (2 * x, torch.full_like(x, 2.0))
    else:
        # The gradient is 2 relu(x) · x³; the derivative of relu(x) in it is again the rule's.
        expected = (2 * x * x**3, 2 * x**3 * x**3 + 2 * x * 3 * x**2)
    torch.testing.assert_close((first, second), expected)


def test_func_grad_and_vmap_give_the_same_as_autograd(gradient):
    x = torch.randn(6, 3)
    weights = torch.randn(3)

    def loss(row):
        return (weights * (F.relu(row) + torch.round(row) + torch.sign(row))).sum()

    with gp.gradient_override({"relu": "guided_relu", "round": seven_times, "sign": torch.tanh}):
        expected, _ = gradient(lambda x: F.relu(x) + torch.round(x) + torch.sign(x), x, weights.expand(6, 3))
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), expected)
        torch.testing.assert_close(torch.func.grad(lambda x: torch.func.vmap(loss)(x).sum())(x), expected)


@pytest.mark.parametrize("rule", ["guided_relu", seven_times, "stop"])
def test_forward_mode_is_refused(rule):
    x = torch.tensor([0.5, -2.0], dtype=torch.float64)

    def loss(x):
        return (F.relu(x) ** 3).sum()

    def by_dual_numbers(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(F.relu(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    forward_modes = [
        lambda: torch.func.jvp(F.relu, (x,), (torch.ones_like(x),)),
        lambda: torch.func.jacfwd(F.relu)(x),
        lambda: torch.func.hessian(loss)(x),
        lambda: by_dual_numbers(x),
        lambda: by_dual_numbers(x.clone().requires_grad_()),
    ]
    with gp.gradient_override({"relu": rule}):
        for forward_mode in forward_modes:
            with pytest.raises(NotImplementedError, match="forward mode AD"):
                forward_mode()
        torch.testing.assert_close(
            torch.func.jacrev(torch.func.jacrev(loss))(x), torch.autograd.functional.hessian(loss, x)
        )
        # Where no derivative passes the rule nothing is refused; of a filtered result nobody can tell.
        if rule != "guided_relu":
            assert torch.func.jvp(lambda y: y * F.relu(x), (x,), (torch.ones_like(x),))[1][0] == 0.5


def test_nothing_is_kept_for_a_rule_that_reads_nothing():
    kept = []
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with gp.gradient_override({"round": seven_times, "floor": "identity", "ceil": "stop"}):
            (torch.round(x) + torch.floor(x) + torch.ceil(x)).sum().backward()
        assert not kept
        with gp.gradient_override({"round": "tanh"}):
            torch.round(x)
    assert len(kept) == 1


def test_settings_that_both_operations_have_are_handed_on(run):
    x = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 4.0]], requires_grad=True)
    step = run(lambda x: x.amax(dim=1, keepdim=True) + 2 * x.amax(dim=0))
    with gp.gradient_override({"amax": "torch.logsumexp"}):
        step(x).sum().backward()
    expected = 3 * torch.softmax(x.detach(), dim=1) + 2 * 2 * torch.softmax(x.detach(), dim=0)
    torch.testing.assert_close(x.grad, expected)
    with gp.gradient_override({"div": "torch.mul"}):
        assert torch.equal(torch.autograd.grad(torch.div(x, 4.0).sum(), x)[0], torch.full((2, 3), 4.0))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("argmax", lambda x: x.argmax(0, keepdim=True)),
        ("argmin", lambda x: x.argmin(0, keepdim=True)),
    ],
)
def test_warns_of_indices_that_become_numbers(name, call):
    x = torch.tensor([1.0, 3.0, 2.0], requires_grad=True)
    message = rf"an index from operation '{name}.* became numbers in 'float'.*: use the values .*\.detach\(\)"
    with gp.gradient_override({name: "identity"}), pytest.warns(UserWarning, match=message) as warned:
        (call(x).float() * x.sum()).sum().backward()
    assert "cast it" not in str(warned[0].message)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, i: x[i],
        lambda x, i: x.gather(0, i),
        lambda x, i: x[(i.unsqueeze(-1) == torch.arange(3)).any(0)],
        lambda x, i: torch.nn.functional.embedding(i.view(1, -1), x[:, None]),
        lambda x, i: torch.zeros(3).index_add(0, i, x[:2]),
        lambda x, i: torch.zeros(3).scatter(0, i, x[:2]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*became numbers")
def test_strict_block_takes_indices_that_select(use):
    x = torch.tensor([1.0, 3.0, 2.0], requires_grad=True)
    with gp.gradient_override({"topk": lambda grad, inputs, output: grad.sum().expand(3)}, strict=True):
        values, indices = x.topk(2)
        (values.sum() + use(x, indices).sum()).backward()
    assert (x.grad != 0).all()


@pytest.mark.mostly_slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        gp.StraightThrough(ops=["round"]),
        gp.Stop(modules="first", at="output"),
        gp.Scale(0.5, params="head.weight"),
    ],
)
def test_export_gives_the_plain_model(policy, strict, net, batch, parameter_gradients, same):
    plain = torch.export.export(net, (batch,), strict=strict).module()
    with gp.install(net, [policy]):
        program = torch.export.export(net, (batch,), strict=strict).module()
        net(batch).sum()
    assert torch.equal(program(batch), plain(batch))
    assert same(parameter_gradients(program, batch), parameter_gradients(plain, batch), tolerance=0)
