"""Draws of bits and categories: every spelling has the rule's gradient, with the right expectation."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D

import gradpolicy as gp

P = torch.tensor([0.15, 0.5, 0.8], dtype=torch.float64)
C = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

BITS = {
    "function": torch.bernoulli,
    "method": lambda p: p.bernoulli(),
    "distribution": lambda p: D.Bernoulli(p).sample(),
    "distribution of logits": lambda p: D.Bernoulli(logits=p.logit()).sample(),
    "independent": lambda p: D.Independent(D.Bernoulli(p), 1).sample(),
    "bits as bools": lambda p: torch.empty(p.shape, dtype=torch.bool).bernoulli_(p).to(p),
}
CATEGORIES = {
    "distribution": lambda p: F.one_hot(D.Categorical(p).sample(), 3).to(p),
    "of logits": lambda p: F.one_hot(D.Categorical(logits=p.log()).sample(), 3).to(p),
    "one-hot distribution": lambda p: D.OneHotCategorical(p).sample(),
    "multinomial": lambda p: F.one_hot(torch.multinomial(p, 1).squeeze(-1), 3).to(p),
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
def test_bits_drawn_in_any_spelling_have_the_expected_gradient(name):
    found, y = gradients({"bernoulli": "bernoulli"}, BITS[name], linear, P, 4000)
    assert_mean_is(y, P)
    torch.testing.assert_close(found.mean(0), expected_over_bits(linear, P))


@pytest.mark.parametrize("name", BITS)
def test_a_rule_of_bits_gets_the_probabilities_that_the_bits_are_one(name):
    toward = lambda grad, inputs, output: grad * inputs[0]  # noqa: E731
    found, _ = gradients({"bernoulli": toward}, BITS[name], linear, P, 2)
    torch.testing.assert_close(found, (P * C).expand(2, 3))


@pytest.mark.parametrize("name", CATEGORIES)
def test_categories_drawn_in_any_spelling_have_the_expected_gradient(name):
    def sample(rows):
        return CATEGORIES[name](torch.softmax(rows, -1))

    # A linear loss: the plain straight-through estimate is exact.
    found, y = gradients({"categorical": "identity"}, sample, linear, P.log(), 4000)
    p = P / P.sum()
    assert_mean_is(y, p)
    torch.testing.assert_close(found.mean(0), p * (C - (p * C).sum()))


def test_shapes_of_samples_and_batches_and_weights_that_do_not_sum_to_one():
    weights, grad = (5 * torch.rand(2, 3)).requires_grad_(), torch.randn(4, 2, 3)
    shares = weights.detach() / weights.detach().sum(-1, keepdim=True)
    with gp.gradient_override({"categorical": "identity"}):
        drawn = torch.multinomial(weights, 4, replacement=True).T, D.Categorical(weights).sample((4,))
        codes = [F.one_hot(one, 3).to(weights) for one in drawn]
    g = grad.sum(0)
    expected = (g - (shares * g).sum(-1, keepdim=True)) / weights.detach().sum(-1, keepdim=True)
    for y in codes:
        assert y.shape == (4, 2, 3)
        found = torch.autograd.grad((y * grad).sum(), weights)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_draws_without_replacement_are_another_operation():
    p = P.clone().requires_grad_()
    with (
        pytest.warns(UserWarning, match="'categorical' was never met; it ran only with arguments"),
        gp.gradient_override({"categorical": "identity"}),
    ):
        torch.multinomial(p, 2)


def test_a_policy_on_a_model_that_samples_by_the_library(as_module, gradient):
    model, x = as_module(lambda x: D.Bernoulli(logits=x).sample() * x.detach()), torch.randn(4, 3)
    with gp.install(model, {"bits": gp.UseRule("bernoulli", ops=["bernoulli"])}, strict=True):
        share = torch.sigmoid(x)
        for each in (model, copy.deepcopy(model)):
            torch.testing.assert_close(gradient(each, x)[0], x * share * (1 - share))


@pytest.mark.parametrize("name", ["function", "distribution"])
def test_where_the_user_switches_gradients_off_they_stay_off(name):
    @gp.gradient_override({"bernoulli": "bernoulli"})
    @torch.no_grad()
    def draw(p):
        return BITS[name](p), torch.is_grad_enabled()

    with pytest.warns(UserWarning, match="'bernoulli' ran only where no gradient is recorded"):
        bits, is_on = draw(P.clone().requires_grad_())
    assert not bits.requires_grad
    assert not is_on


def test_a_comparison_with_a_uniform_draw_takes_a_rule_on_comparisons():
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


def test_other_distributions_and_draws_outside_of_the_block_stay_as_they_are():
    p = P.clone().requires_grad_()
    with gp.gradient_override({"bernoulli": "bernoulli"}):
        torch.bernoulli(p)
        assert not D.Normal(p, 1.0).sample().requires_grad
        assert torch.is_grad_enabled()
    torch.manual_seed(0)
    drawn = D.Bernoulli(p).sample((4,)), D.Categorical(p).sample((4,))
    assert not drawn[0].requires_grad
    torch.manual_seed(0)
    assert torch.equal(drawn[0], torch.bernoulli(P.expand(4, 3)))
    assert torch.equal(drawn[1], torch.multinomial(P[None] / P.sum(), 4, True)[0])


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("draw", "rule"),
    [
        (lambda p: D.Bernoulli(p, validate_args=False).sample(), "bernoulli"),
        (torch.bernoulli, "bernoulli"),
        (lambda p: F.one_hot(D.Categorical(p, validate_args=False).sample(), 3).to(p) * C, "categorical"),
    ],
)
def test_compiled_code_draws_by_the_functions_and_the_library(draw, rule, compiled, gradient):
    inside = gp.gradient_override({rule: "identity"})(draw)
    assert gradient(compiled(inside), P)[0].all()
