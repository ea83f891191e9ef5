"""The rule for branches that a mask leaves out, against two `where`s."""

import math

import pytest
import torch

import gradpolicy as gp

X = torch.tensor([-1.0, 0.0, 0.3, 4.0, math.inf, math.nan], dtype=torch.float64)
KEPT = (X > 0) & X.isfinite()
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 0.0, 5.0, 6.0], dtype=torch.float64)
# Each function with its operations.
FUNCTIONS = {
    "sqrt": (torch.sqrt, ["sqrt"]),
    "sqrt in place": (lambda x: (1 * x).sqrt_(), ["sqrt"]),
    "root": (lambda x: x**0.5, ["sqrt"]),
    "log": (torch.log, ["log"]),
    "div": (lambda x: x.flip(0) / x, ["div"]),
    "1 / x": (lambda x: 1 / x, ["div"]),
    "by one number": (lambda x: x / x[3], ["div"]),
    "power": (lambda x: x**1.7, ["pow"]),
    "of two": (lambda x: x**x, ["pow"]),
    "of a number": (lambda x: 2**x, ["pow"]),
    "norm": (lambda x: (x**2 + (x - 0.3) ** 2).sqrt(), ["sqrt", "pow"]),
    "several": (lambda x: x.rsqrt() + x.log1p() + x.expm1(), ["rsqrt", "log1p", "expm1"]),
}


def masked(function, x):
    return torch.where(KEPT, function(x), 0.0)


def safe(function, x):
    return masked(function, torch.where(KEPT, x, torch.where(x == X[3], X[3], 0.4)))


def gradients(y, x):
    """The gradient, and that of its squared norm."""
    (first,) = torch.autograd.grad(y, x, WEIGHTS.to(y.dtype), create_graph=True)
    return first.detach(), torch.autograd.grad(first.square().sum(), x)[0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_two_wheres(name):
    function, operations = FUNCTIONS[name]
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    with gp.gradient_override(dict.fromkeys(operations, "nan_safe")):
        y = masked(function, x)
    expected = gradients(safe(function, other), other)
    assert all(each.isfinite().all() for each in expected)
    torch.testing.assert_close(gradients(y, x), expected)


class Masked(torch.nn.Module):
    def forward(self, x):
        return sum(masked(function, x) for name, (function, _) in FUNCTIONS.items() if "place" not in name)


@pytest.mark.parametrize("compiled", [False, True])
def test_as_a_policy(compiled):
    operations = ["sqrt", "log", "div", "pow", "rsqrt", "log1p", "expm1"]
    model, plain = Masked(), Masked()
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    with gp.install(model, [gp.UseRule("nan_safe", ops=operations)], strict=True):
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        called(x).backward(WEIGHTS)
    expected = sum(safe(function, other) for name, (function, _) in FUNCTIONS.items() if "place" not in name)
    expected.backward(WEIGHTS)
    torch.testing.assert_close(x.grad, other.grad)
    plain(x).backward(WEIGHTS)
    assert x.grad.isnan().any()


ROWS = torch.tensor([[-math.inf, -math.inf], [1.0, 2.0], [math.nan, 1.0]], dtype=torch.float64)
REDUCTIONS = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: torch.log_softmax(x, dim=1),
    "logsumexp": lambda x: x.logsumexp(dim=-1, keepdim=True),
    "norm": lambda x: x.norm(dim=[1])[:, None],
    "normalize": torch.nn.functional.normalize,
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_rows_that_are_left_out(name):
    x, row = ROWS.clone().requires_grad_(), ROWS[1:2].clone().requires_grad_()
    with gp.gradient_override({name: "nan_safe"}):
        y = torch.where(torch.tensor([[False], [True], [False]]), REDUCTIONS[name](x), 0.0)
    (y * y).sum().backward()
    expected = REDUCTIONS[name](row)
    (expected * expected).sum().backward()
    torch.testing.assert_close(x.grad, torch.cat([0 * row.grad, row.grad, 0 * row.grad]))


def test_nan_where_a_gradient_arrives_is_kept():
    x = X.clone().requires_grad_()
    with gp.gradient_override({"sqrt": "nan_safe"}):
        torch.sqrt(x)[:2].sum().backward()
    assert x.grad.isnan().tolist() == [True, *[False] * 5]
    assert x.grad[1] == math.inf


def test_the_own_derivative_is_kept_where_no_gradient_arrives():
    x, grad = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    with gp.gradient_override({"log": "nan_safe"}):
        (first,) = torch.autograd.grad(torch.log(x), x, grad, create_graph=True)
    assert torch.autograd.grad(first.sum(), grad)[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("where", [{"modules": "0"}, {"params": "*"}, {"modules": "0", "at": "through"}])
def test_operations_must_be_named(where):
    with pytest.raises(gp.PolicyError, match=r"UseRule: rule 'nan_safe' .*name the operations \(ops=\)"):
        gp.UseRule("nan_safe", **where)
