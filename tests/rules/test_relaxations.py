"""The relaxations of rounding against autograd through their own formulas."""

import pickle

import pytest
import torch

import gradpolicy as gp

X = torch.linspace(-2.3, 2.6, 41, dtype=torch.float64)
# Where the steps lie: at integers plus this.
OFFSETS = {"round": 0.5, "floor": 0.0, "ceil": 0.0}


def soft_staircase(x, temperature, offset):
    """Agustsson and Theis's soft rounding, equation 6, moved so that its steps lie at integers + offset."""
    x = x - offset + 0.5
    below = torch.floor(x).detach()
    rest = x - below - 0.5
    return below + torch.tanh(rest / temperature) / torch.tanh(torch.tensor(0.5 / temperature)) / 2 + 0.5


def sum_of_sigmoids(x, temperature, offset):
    steps = torch.arange(-40, 41, dtype=x.dtype) + offset
    return torch.sigmoid((x[..., None] - steps) / temperature).sum(-1)


@pytest.mark.parametrize("temperature", [0.05, 0.2, 0.35])
@pytest.mark.parametrize("operation", OFFSETS)
@pytest.mark.parametrize(
    ("name", "smooth"), [("soft_round", soft_staircase), ("sigmoid_sum", sum_of_sigmoids)]
)
def test_derivative_of_the_staircase(name, smooth, operation, temperature):
    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(smooth(x, temperature, OFFSETS[operation]).sum(), x)[0]
    reach = {"reach": 12} if name == "sigmoid_sum" else {}
    with gp.gradient_override({operation: gp.get_rule(name, temperature=temperature, **reach)}):
        y = getattr(torch, operation)(x)
    found = torch.autograd.grad(y.sum(), x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["soft_round", "sigmoid_sum"])
@pytest.mark.parametrize(
    ("operation", "call", "width", "rise"),
    [
        ("round", lambda x: torch.round(x, decimals=1), 0.1, 0.1),
        ("floor_divide", lambda x: x // 2, 2.0, 1.0),
        ("floor_divide", lambda x: torch.div(x, torch.tensor(-0.5), rounding_mode="floor"), 0.5, -1.0),
        ("int", lambda x: x.int().double(), 1.0, 1.0),
    ],
)
def test_steps_of_another_width(name, operation, call, width, rise):
    rule = gp.get_rule(name, temperature=0.2)
    distance = torch.linspace(-0.5, 0.5, 9, dtype=torch.float64)[1:-1]
    x = (width * (3 + OFFSETS.get(operation, 0.0) + distance)).requires_grad_()
    with gp.gradient_override({operation: rule}):
        (found,) = torch.autograd.grad(call(x).sum(), x)
    expected = rise / width * rule(torch.ones_like(distance), (0.5 + distance,), distance)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["soft_round", "sigmoid_sum", "gumbel", "reinmax"])
@pytest.mark.parametrize("temperature", [0, -1.0, "warm", None, float("nan")])
def test_temperature_must_be_positive(name, temperature):
    x = torch.tensor([0.2, 0.7], requires_grad=True)
    y = gp.apply(gp.get_rule(name, temperature=temperature), torch.round, x)
    with pytest.raises(gp.PolicyError, match=f"'{name}'.* temperature must be a number above 0, .* got"):
        y.sum().backward()


class TestGradientOf:
    def test_exact_derivative(self):
        smooth = gp.gradient_of(lambda x: x - torch.sin(2 * torch.pi * x) / (2 * torch.pi))
        x = X.clone().requires_grad_()
        with gp.gradient_override({"floor": smooth}):
            y = torch.floor(x)
        assert torch.equal(y, torch.floor(X))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 1 - torch.cos(2 * torch.pi * X))

    def test_path_to_a_function(self):
        assert gp.gradient_of("torch.nn.functional.softplus").name == "gradient of softplus"
        with pytest.raises(gp.PolicyError, match="function of tensors or its path, got 3"):
            gp.gradient_of(3)
        with pytest.raises(gp.PolicyError, match="cannot be imported"):
            gp.gradient_of("torch.nn.functional.sofplus")

    def test_functions_of_fewer_inputs(self):
        one, x, y = torch.ones(2), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        product = gp.gradient_of(lambda x, y=None: x**2 if y is None else x * y)
        assert torch.equal(product(one, (x,), x)[0], 2 * x)
        first, second, third = product(one, (x, y, y), x)
        assert torch.equal(first, y)
        assert torch.equal(second, x)
        assert third is None
        with pytest.raises(gp.PolicyError, match=r"'sum' gives shape \(\) at the inputs of .* gives \(2,\)"):
            gp.gradient_of(torch.sum)(one, (x,), x)
        with pytest.raises(gp.PolicyError, match=r"'<lambda>' takes none of the inputs \[\(2,\), \(2,\)\]"):
            gp.gradient_of(lambda: None)(one, (x, y), x)

    def test_it_can_be_pickled_and_compiled(self):
        smooth = pickle.loads(pickle.dumps(gp.gradient_of(torch.sin)))
        x = torch.tensor([0.3, 2.0], requires_grad=True)
        run = torch.compile(torch.floor, backend="eager", fullgraph=True)
        with gp.gradient_override({"floor": smooth}):
            (found,) = torch.autograd.grad(run(x).sum(), x)
        torch.testing.assert_close(found, torch.cos(x.detach()))


def soft_sorted(x, places, descending, temperature):
    """SoftSort as its paper writes it, in the last dimension."""
    chosen = x.sort(dim=-1, descending=descending).values[..., :places]
    distances = (chosen[..., :, None] - x[..., None, :]).abs()
    return (torch.softmax(-distances / temperature, dim=-1) @ x[..., None]).squeeze(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("largest", [False, True])
def test_soft_sort_equals_the_paper(temperature, dim, largest):
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with gp.gradient_override({"topk": gp.get_rule("soft_sort", temperature=temperature)}):
        found = torch.topk(x, 2, dim=dim, largest=largest).values
    weights = torch.randn_like(found)
    (grad,) = torch.autograd.grad((found * weights).sum(), x)
    expected = soft_sorted(x.movedim(dim, -1), 2, largest, temperature).movedim(-1, dim)
    torch.testing.assert_close(grad, torch.autograd.grad((expected * weights).sum(), x)[0])
