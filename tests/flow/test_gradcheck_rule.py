"""gradcheck_rule takes whatever apply takes."""

import numpy as np
import pytest
import torch

import gradpolicy as gp

X, Y = torch.tensor([0.3, -1.2, 0.9]), torch.tensor([2.0, 0.5, -0.7])


def cube_of_arrays(x):
    return (x.astype(np.float64) ** 3).astype(np.float32)


def product(grad, inputs, output):
    return grad * inputs[1], grad * inputs[0]


@pytest.mark.parametrize(
    ("forward", "numpy"),
    [(np.multiply, False), (lambda a, b: a.copy() * b, True), (torch.mul, False)],
)
def test_several_inputs_in_numpy_or_torch(forward, numpy):
    check = gp.gradcheck_rule(product, forward, (X, Y), numpy=numpy)
    assert check.exact
    assert len(check.by_input) == 2
    assert check.dtype == torch.float64
    assert "tolerance 1e-06 (float64)" in str(check)
    wrong = gp.gradcheck_rule(lambda g, i, o: (g * i[1], g), forward, (X, Y), numpy=numpy)
    assert not wrong.exact


def test_arrays_and_other_arguments():
    def forward(values, scale, mode):
        assert mode == "cubed"
        return scale * values**3

    check = gp.gradcheck_rule(lambda g, i, o: 6 * g * i[0] ** 2, forward, (X.numpy(), 2.0, "cubed"))
    assert check.exact
    assert gp.gradcheck_rule("torch.exp", np.exp, X.double().numpy()).exact


def test_tensors_in_containers_are_inputs_in_order():
    check = gp.gradcheck_rule(product, lambda pair: pair["a"] * pair["b"][0], ({"a": X, "b": [Y]},))
    assert check.exact


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize(
    "forward",
    [
        cube_of_arrays,
        lambda x: (torch.eye(3) @ x) ** 3,
        lambda x: (x.double() ** 3).float(),
    ],
    ids=["numpy", "weights in float32", "torch"],
)
def test_the_tolerance_follows_the_precision_of_the_forward_and_is_said(forward, scale):
    x, numpy = X * scale, forward is cube_of_arrays
    check = gp.gradcheck_rule(lambda g, i, o: 3 * g * i[0] ** 2, forward, x, numpy=numpy)
    assert check.exact
    assert check.left_out == 0
    assert check.dtype == torch.float32
    assert "tolerance 0.01 (float32)" in str(check)
    off = gp.gradcheck_rule(lambda g, i, o: 3.3 * g * i[0] ** 2, forward, x, numpy=numpy)
    assert not off.exact
    assert off.length_ratio == pytest.approx(1.1, abs=0.01)
    assert not gp.gradcheck_rule(
        lambda g, i, o: 3 * g * i[0] ** 2, forward, x, tolerance=1e-9, numpy=numpy
    ).exact


def test_several_results_give_the_rule_tuples():
    def rule(grads, inputs, outputs):
        return grads[0] * torch.cos(inputs[0]) + grads[1] * outputs[1]

    assert gp.gradcheck_rule(rule, lambda x: (torch.sin(x), torch.exp(x), x.argmax()), X).exact


def test_the_call_reaches_the_rule():
    def rule(grad, inputs, output, *, call):
        assert call.operation == "cumsum"
        dim = call.arguments["dim"]
        return grad.flip(dim).cumsum(dim).flip(dim)

    assert gp.gradcheck_rule(rule, torch.cumsum, (X, 0)).exact


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(gp.PolicyError, match="gradcheck_rule: the forward must be a function, got 3"):
        gp.gradcheck_rule("identity", 3, torch.ones(1))
    with pytest.raises(gp.PolicyError, match="'identity': there is no floating-point input to check"):
        gp.gradcheck_rule("identity", torch.sin, torch.empty(0))
