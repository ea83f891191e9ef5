import math

import pytest
import torch
from torch.nn import functional

from gradpolicy import get_rule
from gradpolicy.rules.rectifiers import positive_part

X = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0])
GRAD = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])


def of_relu(name, x=X, grad=GRAD):
    return get_rule(name)(grad, (x,), x.relu())


def own_gradient(function, x, grad):
    point = x.clone().requires_grad_()
    return torch.autograd.grad(function(point), point, grad)[0]


def test_guided_passes_positive_gradients_of_active_units():
    assert of_relu("guided_relu").tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_guided_is_the_relus_own_gradient_of_the_positive_part():
    x, grad = torch.randn(100), torch.randn(100)
    assert torch.equal(of_relu("guided_relu", x, grad), own_gradient(torch.relu, x, positive_part(grad)))


def test_guided_is_marked_as_a_filter_so_that_it_holds_for_every_rectifier():
    assert get_rule("guided_relu").gradient_filter is positive_part
    assert get_rule("deconv_relu").gradient_filter is None


@pytest.mark.parametrize(
    ("function", "largest"), [(functional.gelu, 0.13), (functional.silu, 0.10), (functional.leaky_relu, 0.0)]
)
def test_what_guided_means_for_the_relatives(function, largest):
    """The module says how much negative gradient the filter leaves: as much as f' goes below 0."""
    x = torch.linspace(-10, 10, 2001, dtype=torch.float64)
    passed = own_gradient(function, x, positive_part(torch.ones_like(x)))
    assert -passed.min().item() <= largest + 5e-4
    assert own_gradient(function, x, positive_part(-torch.ones_like(x))).abs().max() == 0


def test_deconv_looks_at_the_gradient_only():
    assert of_relu("deconv_relu").tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert torch.equal(get_rule("deconv_relu")(GRAD, (X,), functional.gelu(X)), of_relu("deconv_relu"))


def test_an_inactive_unit_shuts_infinite_gradients_out():
    grad = torch.tensor([math.inf, math.nan])
    assert of_relu("guided_relu", -torch.ones(2), grad).tolist() == [0.0, 0.0]


def test_redirected_is_plain_where_anything_passes():
    assert torch.equal(
        of_relu("redirected_relu", X[None], GRAD[None]), own_gradient(torch.relu, X, GRAD)[None]
    )


def test_redirected_leads_round_a_relu_that_passes_a_sample_nothing():
    x = torch.tensor([[-1.0, -1.0], [-1.0, 1.0]])
    grad = torch.tensor([[-2.0, 3.0], [-2.0, 3.0]])
    assert of_relu("redirected_relu", x, grad).tolist() == [[-2.0, 0.0], [0.0, 3.0]]


def test_redirected_takes_each_entry_of_a_vector_as_a_sample():
    x, grad = torch.tensor([-1.0, -1.0, 1.0]), torch.tensor([-2.0, 2.0, 2.0])
    assert of_relu("redirected_relu", x, grad).tolist() == [-2.0, 0.0, 2.0]
