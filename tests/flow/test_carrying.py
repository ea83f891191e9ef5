"""Discrete results keep their dtype, and what becomes of them has the rule's gradient."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F

import gradpolicy as gp

X = torch.tensor([-1.0, 0.5, 2.0])
W = torch.tensor([1.0, 2.0, 4.0])


def ten_times(grad, inputs, output):
    return 10.0 * grad


def compared(x):
    return x > 0


# What is computed from m = x > 0, and the same of its values s in floating point.
CARRIED = {
    "float": (lambda m: m.float(), lambda s: s),
    "double": (lambda m: m.double(), lambda s: s.double()),
    "to a dtype": (lambda m: m.to(torch.float64), lambda s: s.double()),
    "to a tensor's": (lambda m: m.to(W), lambda s: s),
    "type": (lambda m: m.type(torch.float64), lambda s: s.double()),
    "type_as": (lambda m: m.type_as(W), lambda s: s),
    "through integers": (lambda m: m.int().long().float(), lambda s: s),
    "times floats": (lambda m: m * W, lambda s: s * W),
    "floats times": (lambda m: W * m, lambda s: W * s),
    "times a number": (lambda m: 0.5 * m, lambda s: 0.5 * s),
    "into floats in place": (lambda m: (W * 1).mul_(m), lambda s: W * s),
    "as_tensor": (lambda m: torch.as_tensor(m, dtype=torch.float32), lambda s: s),
    "twice": (lambda m: m.float() * m + m * W, lambda s: s * s + s * W),
    "where, numbers": (lambda m: torch.where(m, 1.0, 0.0), lambda s: s),
    "where, tensors": (lambda m: torch.where(m, W, -W), lambda s: W * s - W * (1 - s)),
    "where, the method": (lambda m: W.where(m, torch.zeros(3)), lambda s: W * s),
    "where, integers": (lambda m: torch.where(m, 3, 1).float(), lambda s: 1 + 2 * s),
    "where, broadcast": (lambda m: torch.where(m[:, None], W, 0.0), lambda s: s[:, None] * W),
    "where, integers, broadcast": (
        lambda m: torch.where(m[:, None], torch.arange(3), 1).float(),
        lambda s: 1 + s[:, None] * (torch.arange(3) - 1),
    ),
    "one_hot of a bit": (
        lambda m: F.one_hot(m.long(), 2) * W[:2],
        lambda s: torch.stack([1 - s, s], -1) * W[:2],
    ),
    "not": (lambda m: (~m).float(), lambda s: 1 - s),
    "logical_not": (lambda m: m.logical_not() * W, lambda s: (1 - s) * W),
    "signs": (lambda m: (m.long() * 2 - 1).float(), lambda s: 2 * s - 1),
    "one minus": (lambda m: (1 - m.int()) * W, lambda s: (1 - s) * W),
    "reshaped": (lambda m: m.reshape(3, 1).expand(3, 2).float(), lambda s: s.reshape(3, 1).expand(3, 2)),
    "permuted": (lambda m: m[None].permute(1, 0).unsqueeze(0) * 1.0, lambda s: s[None].permute(1, 0)[None]),
    "transposed": (lambda m: m[None].T.float(), lambda s: s[None].T),
    "indexed": (lambda m: m[torch.tensor([2, 0, 2])].float(), lambda s: s[torch.tensor([2, 0, 2])]),
}


@pytest.mark.parametrize("name", CARRIED)
def test_carries_the_gradient(name, gradient):
    step, same_in_floats = CARRIED[name]
    weights = torch.randn_like(step(compared(X)).double()).to(step(compared(X)).dtype)
    with gp.gradient_override({"gt": ten_times}, strict=True):
        found, value = gradient(lambda x: step(compared(x)), X, weights)
    expected, _ = gradient(same_in_floats, compared(X).float(), weights)
    assert torch.equal(value, step(compared(X))), "the forward value stays"
    assert value.dtype == step(compared(X)).dtype
    torch.testing.assert_close(found, 10 * expected)


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("gt", lambda x: x > 0),
        ("lt", lambda x: x < 0),
        ("eq", lambda x: x == 0.5),
        ("int", lambda x: (3 * x).int()),
        ("long", lambda x: x.to(torch.int64)),
        ("bool", lambda x: x.bool()),
    ],
)
def test_discrete_results_keep_values_and_dtype(operation, call):
    x = X.clone().requires_grad_()
    with gp.gradient_override({operation: ten_times}):
        result = call(x)
        assert result.dtype == call(X).dtype
        assert torch.equal(result, call(X))
        assert type(result) is torch.Tensor
        assert torch.equal(W[result.long()[:1]], W[call(X).long()[:1]])
        (result * W).sum().backward()
    assert torch.equal(x.grad, 10 * W * (3 if operation == "int" else 1))


def test_filled_infinities_give_no_gradient(gradient):
    @gp.gradient_override({"gt": ten_times})
    def attention(x):
        return F.softmax(torch.where(x > 0, float("-inf"), W), 0)

    assert not gradient(attention, X, W)[0].any()


def test_carries_out_of_the_policys_modules(as_module):
    model = as_module(lambda x: (lambda gate: gate * W + gate.float() - gate.float())(model.gate(x)))
    model.gate, x = as_module(compared), X.clone().requires_grad_()
    policy = gp.UseRule(ten_times, ops=["gt"], modules="gate")
    with gp.install(model, {"gates": policy}, strict=True) as installed:
        model(x).sum().backward()
        assert installed.report().rows[0].matched == {"gt": 1}
    assert torch.equal(x.grad, 10 * W)


# The values in floating point could say what is meant; a bool or integer tensor cannot.
LOST = {
    "gather": lambda m: m.gather(0, m.long()).float(),
    "bool": lambda m: m.int().bool().float(),
    "__invert__": lambda m: (~m.int()).float(),
    "add": lambda m: m + W,
    "add, of bits": lambda m: (m + m).float(),
    "add_": lambda m: torch.zeros(3, dtype=torch.int64).add_(m).float(),
    "sub, of a tensor": lambda m: W - m.int(),
    "mul, complex": lambda m: (m * 1j).real,
    "mul, by name": lambda m: torch.mul(input=W, other=m),
    "and": lambda m: (m & (W > 1)).float(),
    "sum": lambda m: m.sum(dtype=torch.float32),
    "where, as a value": lambda m: torch.where(W > 1, m, 0.5),
    "where, by name": lambda m: torch.where(condition=m, input=W, other=-W),
    "one_hot": lambda m: F.one_hot(m.long(), 3).float(),
    "cat": lambda m: torch.cat([m, W]),
    "split": lambda m: m.split(2)[0].float(),
    "written into floats": lambda m: (into := W * 1, into.__setitem__(slice(2), m[1:]))[0],
    "a change in place": lambda m: m.logical_or_(W > 1).float(),
    "__getitem__": lambda m: W[m],
    "masked_fill": lambda m: W.masked_fill(m, 0.0),
    "setitem": lambda m: (m.__setitem__(0, True), m.float())[1],
}


@pytest.mark.parametrize("name", LOST)
def test_what_cannot_carry_it_says_so(name):
    x = X.clone().requires_grad_()
    expected = LOST[name](X > 0)
    with (
        pytest.warns(UserWarning, match="result of operation 'gt' went through") as warned,
        gp.gradient_override({"gt": ten_times}),
    ):
        result = LOST[name](x > 0)
    assert torch.equal(result, expected)
    assert not result.requires_grad
    assert "never became floating-point" in str(warned[-1].message)


def test_it_is_said_once_and_names_the_policy(as_module):
    model = as_module(lambda x: x[x > 0] + x[x > 0])
    policies = {"masks": gp.UseRule(ten_times, ops=["gt"])}
    with pytest.warns(UserWarning, match="went through '__getitem__'") as warned, gp.install(model, policies):
        model(X.clone().requires_grad_())
    assert [str(one.message).partition(":")[0] for one in warned] == ["policy 'masks'", "policy 'masks'"]


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m.detach().float(),
        lambda m: torch.zeros_like(m, dtype=torch.float32),
        lambda m: bool(m.any()) or m.shape or m.tolist(),
    ],
)
def test_what_needs_no_gradient_gives_no_warning_of_its_own(use):
    with (
        pytest.warns(UserWarning, match="the result of 'gt' never became floating-point") as warned,
        gp.gradient_override({"gt": ten_times}),
    ):
        use(X.clone().requires_grad_() > 0)
    assert len(warned) == 1


def test_a_mask_can_be_copied_and_saved():
    with gp.gradient_override({"gt": ten_times}):
        m = X.clone().requires_grad_() > 0
        torch.save(m, file := io.BytesIO())
        file.seek(0)
        for other in (copy.deepcopy(m), torch.load(file, weights_only=True)):
            assert not other.float().requires_grad
            assert torch.equal(other, X > 0)
        assert m.float().requires_grad


def test_vmap_and_grad_give_the_same_as_autograd(gradient):
    rows = torch.randn(4, 3)

    def step(row):
        return (row > 0) * W + torch.where(row > 0, 1.0, 0.0)

    with gp.gradient_override({"gt": "tanh"}):
        expected, _ = gradient(step, rows)
        found = torch.func.vmap(torch.func.grad(lambda row: step(row).sum()))(rows)
    torch.testing.assert_close(found, expected)


def scattered(target, index, value):
    """Return a target into which a value was scattered in place."""
    target.scatter_(-1, index, value)
    return target


@pytest.mark.parametrize("name", ["identity", "gumbel"])
@pytest.mark.parametrize(
    "one_hot",
    [
        lambda x: F.one_hot(x.argmax(-1), 4).float(),
        lambda x: F.one_hot(x.argmax(-1)[[1, 0]].view(2, 1)).float()[[1, 0], 0],
        lambda x: F.one_hot(torch.argmax(x, 1, keepdim=True), 4).squeeze(1) * 1.0,
        lambda x: F.one_hot(x.argmax(-1).int().long(), 6)[:, :4].to(x),
        lambda x: torch.zeros(2, 4).scatter_(1, x.argmax(-1, keepdim=True), 1.0),
        lambda x: torch.stack([torch.zeros(4).scatter_(0, row.argmax(), 1.0) for row in x]),
        lambda x: -torch.zeros(4, 2).scatter(0, index=x.argmax(-1)[None], src=-torch.ones(1, 2)).T,
        lambda x: scattered(torch.ones(2, 4), x.argmax(-1, keepdim=True), 0.0) * -1.0 + 1.0,
        lambda x: scattered(torch.zeros(2, 4, dtype=torch.int), x.argmax(-1, keepdim=True), 1).float(),
    ],
)
def test_an_argmax_that_becomes_a_one_hot_code(name, one_hot, gradient):
    scores, weights = torch.tensor([[0.0, 1.0, 3.0, 2.0], [0.0, 1.0, 2.0, 3.0]]), torch.randn(2, 4)
    with gp.gradient_override({"argmax": name}, strict=True):
        found, value = gradient(one_hot, scores, weights)
    assert torch.equal(value, F.one_hot(scores.argmax(-1), 4).float())
    torch.testing.assert_close(found, gp.get_rule(name)(weights, (scores,), value))


def test_a_scattered_code_has_its_values_in_later_products(gradient):
    def squared(x):
        code = 1 - torch.ones(2, 4, dtype=torch.int).scatter(-1, x.argmax(-1, keepdim=True), 0)
        return (code * code).float()

    scores, weights = torch.tensor([[0.0, 1.0, 3.0, 2.0], [0.0, 1.0, 2.0, 3.0]]), torch.randn(2, 4)
    with gp.gradient_override({"argmax": "identity"}):
        found, value = gradient(squared, scores, weights)
    assert torch.equal(value, F.one_hot(scores.argmax(-1), 4).float())
    torch.testing.assert_close(found, 2 * value * weights)


COMPILED = ("indexed", "times floats", "where, tensors", "not", "one minus", "signs", "permuted")


@pytest.mark.parametrize(
    "name", ["float", *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED)]
)
def test_compiled_code_carries_it_too(name, gradient, compiled):
    step, _ = CARRIED[name]

    @gp.gradient_override({"gt": ten_times})
    def inside(x):
        return step(x > 0)

    torch.testing.assert_close(gradient(compiled(inside), X), gradient(inside, X))


def test_a_mask_carries_it_into_compiled_code_and_out_of_it(gradient, compiled):
    step, cast = compiled(lambda x: x > 0), compiled(lambda m: m.float())
    with gp.gradient_override({"gt": ten_times}):
        assert torch.equal(gradient(lambda x: step(x) * W, X)[0], 10 * W)
        assert torch.equal(gradient(lambda x: cast(x > 0), X)[0], torch.full((3,), 10.0))
