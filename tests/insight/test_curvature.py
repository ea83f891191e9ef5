"""Curvature is the derivative of the gradient that training follows: under policies that of their field."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradpolicy as gp

CURVATURE = gp.curvature


def network(activation=nn.Tanh, dtype=torch.float64):
    return nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3)).to(dtype)


def problem(model):
    """The loss of a model on a fixed batch, and its parameters."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(20, 4, generator=generator, dtype=torch.float64).to(next(model.parameters()).dtype)
    labels = torch.randint(0, 3, (20,), generator=generator)
    return lambda: functional.cross_entropy(model(inputs), labels), dict(model.named_parameters())


def flat(tensors):
    """All entries of tensors, or of a dict of them."""
    return torch.cat(
        [each.flatten() for each in (tensors.values() if isinstance(tensors, dict) else tensors)]
    )


def hessian(loss, parameters):
    """Row by row: autograd of each entry of the gradient."""
    inputs = list(parameters.values())
    again = {"retain_graph": True, "materialize_grads": True}
    gradient = flat(torch.autograd.grad(loss(), inputs, create_graph=True))
    return torch.stack([flat(torch.autograd.grad(entry, inputs, **again)) for entry in gradient])


def field_derivative(loss, parameters):
    """Column by column, from gradients at moved parameters: the derivative of a field with rules in it."""
    columns = []
    for parameter in parameters.values():
        for entry in range(parameter.numel()):
            sides = []
            for step in (1e-5, -1e-5):
                before = parameter.detach().clone()
                with torch.no_grad():
                    parameter.view(-1)[entry] += step
                sides.append(flat(torch.autograd.grad(loss(), list(parameters.values()))))
                with torch.no_grad():
                    parameter.copy_(before)
            columns.append((sides[0] - sides[1]) / 2e-5)
    return torch.stack(columns, dim=1)


def random_like(parameters, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in parameters.items()}


def square_half(x):
    return torch.square(x).square().sum() / 2


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
    with gp.gradient_override({"round": "identity"}):
        found = CURVATURE.gradient_at(lambda: x.round().square().sum(), {"x": x}, {"x": torch.ones(2)})
    assert found["x"].tolist() == [4.0, 6.0]


# ---- products


def test_hvp_without_a_policy_is_the_hessians_also_at_kinks_and_in_float32():
    for activation, dtype, tolerance in ((nn.Tanh, torch.float64, 1e-12), (nn.ReLU, torch.float32, 1e-5)):
        loss, parameters = problem(network(activation, dtype))
        vector = random_like(parameters)
        expected = hessian(loss, parameters) @ flat(vector)
        found = flat(CURVATURE.hvp(loss, parameters, vector))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hvp_under_a_policy_is_the_derivative_of_the_policys_gradient(dtype):
    """``y = x²`` with the rule ``x · grad``: the gradient of ``y²/2`` is x³, and nesting would give 2x²."""
    x = torch.tensor([0.6, -1.1], dtype=dtype, requires_grad=True)
    with gp.gradient_override({"square": half_rule}), torch.no_grad():
        one = CURVATURE.hvp(lambda: gp.apply(half_rule, torch.square, x).square().sum() / 2, {"x": x}, {})
    assert one["x"].tolist() == [0.0, 0.0]

    def loss():
        return (gp.apply(half_rule, torch.square, x) ** 2).sum() / 2

    found = CURVATURE.hvp(loss, {"x": x}, {"x": torch.ones_like(x)})["x"]
    torch.testing.assert_close(
        found, 3 * x.detach() ** 2, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=0
    )


@pytest.mark.parametrize("place", ["block", "operation", "relu", "boundary", "parameter"])
def test_a_policy_in_force_is_noticed_wherever_it_acts(place):
    model = network(nn.ReLU if place == "relu" else nn.Tanh)
    loss, parameters = problem(model)
    policies = {
        "operation": gp.UseRule(half_rule, ops=["tanh"]),
        "relu": gp.Guided(),
        "boundary": gp.Clip(norm=0.05, modules="2"),
        "parameter": gp.UseRule(lambda grad, inputs, output: grad * inputs[0], params="0.weight"),
    }
    block = (
        gp.gradient_override({"tanh": half_rule})
        if place == "block"
        else gp.install(model, [policies[place]])
    )
    vector = random_like(parameters)
    with block:
        expected = field_derivative(loss, parameters) @ flat(vector)
        found = flat(CURVATURE.hvp(loss, parameters, vector))
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


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "tanh"])
def test_estimates_lie_as_near_as_their_standard_errors_say(policy):
    loss, parameters = problem(network())
    block = gp.gradient_override({"tanh": half_rule}) if policy else torch.enable_grad()
    with block:
        exact = field_derivative(loss, parameters)
        generator = torch.Generator().manual_seed(2)
        trace = CURVATURE.trace(loss, parameters, samples=200, generator=generator)
        norm = CURVATURE.frobenius_norm(loss, parameters, samples=200, generator=generator)
    assert abs(trace.value - float(exact.trace())) < 3 * trace.standard_error
    assert abs(norm.value - float(exact.norm())) < 3 * norm.standard_error
    # The variance of Hutchinson's estimator with random signs is known.
    symmetric = (exact + exact.T) / 2
    variance = 2 * (symmetric.norm() ** 2 - symmetric.diagonal().norm() ** 2)
    assert trace.standard_error == pytest.approx(math.sqrt(float(variance) / 200), rel=0.25)


def quadratic(matrix):
    x = torch.zeros(len(matrix), dtype=torch.float64, requires_grad=True)
    return (lambda: x @ matrix @ x / 2), {"x": x}


def test_estimates_are_exact_where_the_hessian_is_diagonal():
    matrix = torch.diag(torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64))
    loss, parameters = quadratic(matrix)
    trace = CURVATURE.trace(loss, parameters, samples=2)
    assert (trace.value, trace.standard_error) == (2.5, 0.0)
    assert CURVATURE.frobenius_norm(loss, parameters, samples=2).value == pytest.approx(math.sqrt(10.25))
    zero = CURVATURE.frobenius_norm(*quadratic(0 * matrix), samples=2)
    assert (zero.value, zero.standard_error) == (0.0, 0.0)


# ---- what is left as it was


class Noisy(nn.Module):
    """Dropout, and normalisation by running statistics that each call moves."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layers = network()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        self.norm(x)
        return self.dropout(self.layers((x - self.norm.running_mean) / self.norm.running_var.sqrt()))


@pytest.mark.parametrize("policy", [None, "tanh"])
def test_each_evaluation_sees_the_same_and_everything_is_put_back(policy):
    model = Noisy().double().train()
    loss, parameters = problem(model)
    parameters = {name: parameter for name, parameter in parameters.items() if "layers" in name}
    model.layers[0].weight.grad = torch.ones_like(model.layers[0].weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    vector = random_like(parameters)
    random = torch.get_rng_state()
    with gp.gradient_override({"tanh": torch.tanh}) if policy else torch.enable_grad():
        first = flat(CURVATURE.hvp(loss, parameters, vector))
        assert torch.equal(torch.get_rng_state(), random)
        second = flat(CURVATURE.hvp(loss, parameters, vector))
    assert torch.equal(first, second)
    model.norm.momentum = 0.0
    torch.set_rng_state(random)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert model.layers[0].weight.grad.eq(1).all()
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


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        ({"W": torch.ones(2)}, r"delta: unknown parameter 'W'; .*'w'"),
        ({"w": torch.ones(1)}, r"delta\['w'\] has shape"),
    ],
)
def test_a_wrong_name_or_shape_is_named(delta, message):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(gp.PolicyError, match=message):
        CURVATURE.gradient_at(lambda: x.sum(), {"w": x}, delta)


def test_half_precision_is_refused_where_differences_are_needed():
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert CURVATURE.hvp(lambda: (x**2).sum(), {"x": x}, {"x": torch.ones_like(x)})["x"].tolist() == [2, 2]
    with pytest.raises(gp.PolicyError, match=r"'x' is torch.bfloat16; float32 is needed"):
        CURVATURE.hvp(lambda: gp.apply("identity", torch.round, x).sum(), {"x": x}, {"x": torch.ones_like(x)})
