import itertools

import pytest
import torch
from torch.nn import functional

from gradpolicy import get_rule, gradcheck_rule

PROBABILITIES = torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
LOGITS = torch.tensor([0.5, -1.0, 0.2, 1.3], dtype=torch.float64)


def random_quadratic(size=4):
    matrix = torch.randn(size, size, dtype=torch.float64)
    return lambda y: y @ matrix @ y


def bits(p):
    """Yield every outcome of independent bits with its probability."""
    for each in itertools.product((0.0, 1.0), repeat=len(p)):
        y = p.new_tensor(each)
        yield torch.where(y == 1, p, 1 - p).prod(), y


def categories(logits):
    """Return every one-hot sample with its probability."""
    return zip(torch.softmax(logits, -1), torch.eye(len(logits), dtype=logits.dtype), strict=True)


def expected(rule, outcomes, x, loss):
    """Return the expectation of a rule's gradient, and the gradient of the expected loss."""
    x = x.clone().requires_grad_()
    estimate, total = torch.zeros_like(x), 0.0
    for probability, y in outcomes(x):
        y = y.detach().requires_grad_()
        (grad,) = torch.autograd.grad(loss(y), y)
        estimate += probability.detach() * get_rule(rule)(grad, (x.detach(),), y.detach())
        total = total + probability * loss(y.detach())
    return estimate, torch.autograd.grad(total, x)[0]


def test_bernoulli_is_exact_for_linear_losses():
    linear = PROBABILITIES.new_tensor([1.0, -2.0, 0.5])
    torch.testing.assert_close(*expected("bernoulli", bits, PROBABILITIES, lambda y: y @ linear))
    # For y² the true gradient is 1 for each bit, the expected estimate 2p.
    estimate, true = expected("bernoulli", bits, PROBABILITIES, lambda y: y.square().sum())
    torch.testing.assert_close(estimate, 2 * PROBABILITIES)
    torch.testing.assert_close(true, torch.ones_like(true))


@pytest.mark.parametrize("slope", [2.5, 6.0])
def test_the_slope_sharpens_the_probability(slope):
    def sharpened(p):
        return torch.sigmoid(slope * torch.logit(p))

    assert gradcheck_rule(get_rule("bernoulli", slope=slope), sharpened, PROBABILITIES).exact


@pytest.mark.parametrize("slope", [1.0, 3.0, 200.0, torch.tensor(64.0)])
def test_certain_bits_give_numbers(apply_rule, slope):
    p = torch.tensor([0.0, 1.0, 0.5])
    steep = apply_rule("bernoulli", p, slope=slope)
    assert bool(steep.isfinite().all())
    torch.testing.assert_close(steep[2], torch.as_tensor(slope))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("dim", [-1, 0])
def test_gumbel_equals_torchs_gumbel_softmax(temperature, dim):
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(5, 4, dtype=torch.float64)
    torch.manual_seed(3)
    hard = functional.gumbel_softmax(logits, tau=temperature, hard=True, dim=dim)
    reference = torch.autograd.grad(hard, logits, grad)[0]
    torch.manual_seed(3)
    noisy = logits.detach() - torch.empty_like(logits).exponential_().log()
    got = get_rule("gumbel", temperature=temperature, dim=dim)(grad, (noisy,), hard.detach())
    torch.testing.assert_close(got, reference)


@pytest.mark.parametrize(("name", "of_quadratic"), [("gumbel", False), ("reinmax", True)])
def test_exact_losses_of_gumbel_and_reinmax(name, of_quadratic):
    torch.testing.assert_close(*expected(name, categories, LOGITS, lambda y: 3 * y[0] - y[2]))
    estimate, true = expected(name, categories, LOGITS, random_quadratic())
    assert torch.allclose(estimate, true, rtol=1e-9, atol=1e-12) == of_quadratic


def test_reinmax_follows_the_papers_algorithm():
    """π₂ = 2 softmax(stop(ln π₁ − x) + x) − π₀ / 2, with y in its place in the forward."""
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(6, 4, dtype=torch.float64)
    sample = torch.distributions.OneHotCategorical(logits=x).sample()
    smoothed = (torch.softmax(x / 1.3, -1) + sample) / 2
    first = torch.softmax((smoothed.log() - x).detach() + x, -1)
    reference = torch.autograd.grad(2 * first - torch.softmax(x, -1) / 2, x, grad)[0]
    got = get_rule("reinmax", temperature=1.3)(grad, (x.detach(),), sample)
    torch.testing.assert_close(got, reference)
