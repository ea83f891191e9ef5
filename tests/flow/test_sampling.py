"""Draws of bits and categories: every spelling has the rule's gradient, with the right expectation."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import gradpolicy as gp

P = torch.tensor([0.15, 0.5, 0.8], dtype=torch.float64)
C = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

BITS = {
    "function": torch.bernoulli,
    "method": lambda p: p.bernoulli(),
    "bits as bools": lambda p: torch.empty(p.shape, dtype=torch.bool).bernoulli_(p).to(p),
}


def linear(y):
    return (y * C).sum(-1)


def expected_over_bits(loss, p):
    """The exact gradient of E[loss(y)], by enumeration of all outcomes."""
    p = p.detach().requires_grad_()
    total = torch.zeros((), dtype=p.dtype)
    for bits in itertools.product([0.0, 1.0], repeat=len(p)):
        y = torch.tensor(bits, dtype=p.dtype)
        total = total + torch.where(y > 0, p, 1 - p).prod() * loss(y)
    return torch.autograd.grad(total, p)[0]


def assert_mean_is(draws, expected):
    """Within 4.5 standard errors of the mean; exactly, where all draws are the same."""
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - expected).abs() <= 4.5 * error + 1e-9).all()


def gradients(override, sample, loss, parameter, count):
    """One row for each draw: the gradient with respect to its own copy of the parameter."""
    rows = parameter.expand(count, -1).clone().requires_grad_()
    with gp.gradient_override(override, strict=True):
        y = sample(rows)
        assert y.dtype == parameter.dtype
    loss(y).sum().backward()
    return rows.grad, y.detach()


@pytest.mark.parametrize("name", BITS)
def test_gradient_of_bits(name):
    found, y = gradients({"bernoulli": "bernoulli"}, BITS[name], linear, P, 4000)
    assert_mean_is(y, P)
    torch.testing.assert_close(found.mean(0), expected_over_bits(linear, P))
    # The rule's input is the probability that the bit is 1.
    toward = lambda grad, inputs, output: grad * inputs[0]  # noqa: E731
    found, _ = gradients({"bernoulli": toward}, BITS[name], linear, P, 2)
    torch.testing.assert_close(found, (P * C).expand(2, 3))


def test_gradient_of_categories():
    def sample(rows):
        return F.one_hot(torch.multinomial(torch.softmax(rows, -1), 1).squeeze(-1), 3).to(rows)

    # A linear loss: the plain straight-through estimate is exact.
    found, y = gradients({"categorical": "identity"}, sample, linear, P.log(), 4000)
    p = P / P.sum()
    assert_mean_is(y, p)
    torch.testing.assert_close(found.mean(0), p * (C - (p * C).sum()))


def test_draws_without_replacement_are_another_operation():
    p = P.clone().requires_grad_()
    with (
        pytest.warns(UserWarning, match="'categorical' was never met; it ran only with arguments"),
        gp.gradient_override({"categorical": "identity"}),
    ):
        torch.multinomial(p, 2)


@pytest.mark.parametrize(
    "draw",
    [torch.no_grad()(torch.bernoulli), lambda p: torch.distributions.Bernoulli(p).sample()],
    ids=["own no_grad", "torch.distributions"],
)
def test_warns_of_draws_under_no_grad(draw):
    with pytest.warns(UserWarning, match="'bernoulli' ran only where no gradient is recorded"):
        bits = gp.gradient_override({"bernoulli": "bernoulli"})(draw)(P.clone().requires_grad_())
    assert not bits.requires_grad


def test_apply_on_torch_distributions():
    p = P.clone().requires_grad_()
    bits = gp.apply("bernoulli", lambda p: torch.distributions.Bernoulli(p).sample(), p)
    linear(bits).backward()
    torch.testing.assert_close(p.grad, C)


def test_comparisons_with_uniform_draws():
    p = P.expand(4000, 3).clone().requires_grad_()
    with gp.gradient_override({"gt": "bernoulli"}, strict=True):
        y = (p > torch.rand_like(p)).to(p)
    assert_mean_is(y.detach(), P)
    linear(y).sum().backward()
    torch.testing.assert_close(p.grad.mean(0), expected_over_bits(linear, P))
    with (
        pytest.warns(UserWarning, match="'bernoulli' was never met; what ran there: 'lt'"),
        gp.gradient_override({"bernoulli": "bernoulli"}),
    ):
        assert not (torch.rand_like(p) < p).requires_grad


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("draw", "rule"),
    [
        (torch.bernoulli, "bernoulli"),
        (lambda p: F.one_hot(torch.multinomial(p, 1).squeeze(-1), 3).to(p) * C, "categorical"),
    ],
)
def test_draws_in_compiled_code(draw, rule, compiled, gradient):
    inside = gp.gradient_override({rule: "identity"})(draw)
    assert gradient(compiled(inside), P)[0].all()
