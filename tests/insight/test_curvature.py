"""Curvature is the derivative of the gradient that training follows: under policies that of their field."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradpolicy as gp

CURVATURE = gp.curvature


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def problem(model):
    """The loss of a model on a fixed batch, its parameters, and a vector."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (20,), generator=generator)
    parameters = dict(model.named_parameters())
    vector = {n: torch.randn(p.shape, generator=generator).double() for n, p in parameters.items()}
    return lambda: functional.cross_entropy(model(inputs), labels), parameters, vector


def flat(tensors):
    return torch.cat([each.flatten() for each in tensors.values()])


def half_rule(grad, inputs, output):
    return grad * inputs[0]


# ---- gradients elsewhere


def test_gradient_at_is_the_gradient_of_the_moved_parameters():
    x, y = (torch.tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
    found = CURVATURE.gradient_at(
        lambda: (x**3 * y).sum(), {"x": x, "y": y}, {"x": torch.tensor([1.0, -1.0])}
    )
    assert found["x"].tolist() == [12.0, 6.0]
    assert found["y"].tolist() == [8.0, 1.0]
    assert x.tolist() == [1.0, 2.0]


# ---- products


def test_hvp_without_a_policy_is_the_hessians_also_at_kinks_and_in_float32():
    x, y = torch.tensor([0.0, 2.0], requires_grad=True), torch.tensor([1.0, 3.0], requires_grad=True)
    along = {"x": torch.ones(2), "y": torch.ones(2)}
    found = CURVATURE.hvp(lambda: (x.relu().square() * y).sum(), {"x": x, "y": y}, along)
    assert found["x"].tolist() == [0.0, 10.0]
    assert found["y"].tolist() == [0.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hvp_under_a_policy_is_the_derivative_of_the_policys_gradient(dtype):
    """``y = x²`` with the rule ``x · grad``: the gradient of ``y²/2`` is x³, and nesting would give 2x²."""
    x = torch.tensor([0.6, -1.1], dtype=dtype, requires_grad=True)

    def loss():
        return (gp.apply(half_rule, torch.square, x) ** 2).sum() / 2

    found = CURVATURE.hvp(loss, {"x": x}, {"x": torch.ones_like(x)})["x"]
    torch.testing.assert_close(
        found, 3 * x.detach() ** 2, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=0
    )
    assert CURVATURE.hvp(loss, {"x": x}, {})["x"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "block",
    [
        lambda model: gp.gradient_override({"tanh": half_rule}),
        lambda model: gp.install(model, [gp.UseRule(half_rule, ops=["tanh"])]),
        lambda model: gp.install(model, [gp.Clip(norm=0.05, modules="2")]),
        lambda model: gp.install(model, [gp.UseRule(half_rule, params="0.weight")]),
    ],
)
def test_a_policy_in_force_is_noticed_wherever_it_acts(block):
    model = network()
    loss, parameters, vector = problem(model)
    with block(model):
        above, below = (
            flat(CURVATURE.gradient_at(loss, parameters, {n: step * v for n, v in vector.items()}))
            for step in (1e-5, -1e-5)
        )
        found = flat(CURVATURE.hvp(loss, parameters, vector))
    expected = (above - below) / 2e-5
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    plain = flat(CURVATURE.hvp(loss, parameters, vector))
    assert (plain - expected).norm() > 1e-3 * expected.norm()


def test_differences_stand_in_where_autograd_has_no_second_derivative():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return 3 * grad * ctx.saved_tensors[0] ** 2

    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    found = CURVATURE.hvp(lambda: Cube.apply(x).square().sum(), {"x": x}, {"x": torch.ones(2).double()})["x"]
    torch.testing.assert_close(found, 30 * x.detach() ** 4, rtol=1e-8, atol=0)


# ---- estimates


def quadratic(matrix):
    x = torch.zeros(len(matrix), dtype=torch.float64, requires_grad=True)
    return (lambda: x @ matrix @ x / 2), {"x": x}


def test_estimates_lie_as_near_as_their_standard_errors_say():
    generator = torch.Generator().manual_seed(2)
    exact = torch.randn(10, 10, generator=generator, dtype=torch.float64)
    exact = exact + exact.T
    trace = CURVATURE.trace(*quadratic(exact), samples=200, generator=generator)
    norm = CURVATURE.frobenius_norm(*quadratic(exact), samples=200, generator=generator)
    assert abs(trace.value - float(exact.trace())) < 3 * trace.standard_error
    assert abs(norm.value - float(exact.norm())) < 3 * norm.standard_error
    # The variance of Hutchinson's estimator with random signs is known.
    variance = 2 * (exact.norm() ** 2 - exact.diagonal().norm() ** 2)
    assert trace.standard_error == pytest.approx(math.sqrt(float(variance) / 200), rel=0.25)
    zero = CURVATURE.frobenius_norm(*quadratic(0 * exact), samples=2)
    assert (zero.value, zero.standard_error) == (0.0, 0.0)


# ---- what is left as it was


@pytest.mark.parametrize("policy", [None, "tanh"])
def test_each_evaluation_sees_the_same_and_everything_is_put_back(policy):
    model = nn.Sequential(nn.BatchNorm1d(4), network(), nn.Dropout(0.5)).double()
    loss, parameters, vector = problem(model)
    parameters["1.0.weight"].grad = torch.ones(5, 4).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    with gp.gradient_override({"tanh": torch.tanh}) if policy else torch.enable_grad():
        first = flat(CURVATURE.hvp(loss, parameters, vector))
        assert torch.equal(torch.get_rng_state(), random)
        second = flat(CURVATURE.hvp(loss, parameters, vector))
    assert torch.equal(first, second)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert parameters["1.0.weight"].grad.eq(1).all()
    assert float(first.norm()) < 100


def test_a_loss_that_fails_leaves_the_parameters_as_they_were():
    x = torch.tensor([0.1, 0.7], requires_grad=True)
    before, calls = x.detach().clone(), []

    def loss():
        calls.append(x.detach().clone())
        if len(calls) > 2:
            raise ValueError("no more")
        return gp.apply("identity", torch.round, x).square().sum()

    with pytest.raises(ValueError, match="no more"):
        CURVATURE.hvp(loss, {"x": x}, {"x": torch.ones(2)})
    assert not torch.equal(calls[1], before)
    assert torch.equal(x, before)


# ---- wrong input


def test_a_wrong_name_or_shape_is_named():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(gp.PolicyError, match=r"delta: unknown parameter 'W'; .*'w'"):
        CURVATURE.gradient_at(lambda: x.sum(), {"w": x}, {"W": torch.ones(2)})
    with pytest.raises(gp.PolicyError, match=r"delta\['w'\] has shape"):
        CURVATURE.gradient_at(lambda: x.sum(), {"w": x}, {"w": torch.ones(1)})


def test_half_precision_is_refused_where_differences_are_needed():
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert CURVATURE.hvp(lambda: (x**2).sum(), {"x": x}, {"x": torch.ones_like(x)})["x"].tolist() == [2, 2]
    with pytest.raises(gp.PolicyError, match=r"'x' is torch.bfloat16; float32 is needed"):
        CURVATURE.hvp(lambda: gp.apply("identity", torch.round, x).sum(), {"x": x}, {"x": torch.ones_like(x)})
