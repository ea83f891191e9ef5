"""Derivatives of other functions as rules, and temperatures of relaxations."""

import pickle

import pytest
import torch

import gradpolicy as gp

X = torch.linspace(-2.3, 2.6, 41, dtype=torch.float64)


@pytest.mark.parametrize("name", ["gumbel", "reinmax"])
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

    @pytest.mark.parametrize(
        ("function", "second"),
        [
            (lambda x, slope=1.0: slope * x**2, False),
            (lambda x, y=None, *, slope=1.0: slope * x**2, True),
            (lambda x, *others: x**2, True),
            (lambda x, y: x**2 if float(y.sum()) else x, True),
            (torch.square, False),
            (torch.atan2, True),
            (torch.nn.functional.softplus, False),
            (torch.nn.functional.leaky_relu, False),
            (torch.nn.Softplus(), False),
        ],
    )
    def test_the_signature_says_how_many_inputs_it_takes(self, function, second):
        one, x, y = torch.ones(2), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        found = gp.gradient_of(function)(one, (x, y), x)
        assert (found[1] is not None) == second
        leaf = x.clone().requires_grad_()
        function(leaf, *([y] if second else [])).sum().backward()
        assert found[0].equal(leaf.grad)
        fails = gp.gradient_of(lambda x, y=None: x**2 if y is None else x @ torch.ones(3, 3))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            fails(one, (x, y), x)

    @pytest.mark.parametrize(
        ("name", "function"),
        [("div", lambda x: 3 / x), ("pow", lambda x: 2**x), ("sub", lambda x: 2 - x)],
    )
    def test_of_an_operation_on_a_number_and_a_tensor(self, name, function):
        x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
        with gp.gradient_override({name: f"torch.{name}"}):
            function(x).sum().backward()
        function(other).sum().backward()
        torch.testing.assert_close(x.grad, other.grad)

    def test_it_can_be_pickled_and_compiled(self):
        smooth = pickle.loads(pickle.dumps(gp.gradient_of(torch.sin)))
        x = torch.tensor([0.3, 2.0], requires_grad=True)
        run = torch.compile(torch.floor, backend="eager", fullgraph=True)
        with gp.gradient_override({"floor": smooth}):
            (found,) = torch.autograd.grad(run(x).sum(), x)
        torch.testing.assert_close(found, torch.cos(x.detach()))
