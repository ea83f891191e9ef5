"""Forwards written for NumPy, for torch, or for both; each runs once."""

import numpy as np
import pytest
import torch

import gradpolicy as gp

X = torch.tensor([0.2, 1.7])


def loop(x):
    result = x.copy()
    for index in range(len(result)):
        result[index] = round(float(result[index]))
    return result


def written(x):
    x[np.array([True, False])] = np.float32(7.0)
    x[1:] = np.array([3.0], dtype=np.float32)
    return x


FORWARDS = {
    "astype": lambda x: np.floor(x).astype(np.int64),
    "astype first": lambda x: x.astype(np.float64).round(),
    "copy after torch's own operators": lambda x: (x * 2).copy(),
    "a loop over a copy": loop,
    "operators with arrays": lambda x: np.ones(2, dtype=np.float32) * x + x - np.sqrt(x) @ np.eye(2),
    "numpy's other functions": lambda x: np.where(x > 1, x, np.clip(x, 0.5, 1.0)),
    "arrays as indices": lambda x: x[np.argsort(x)] + x[::-1] + x[None, np.array([0, 1])][0],
    "arrays written into it": lambda x: written(x.copy()) + written(x * 1),
    "an array made of it": lambda x: np.asarray(x, dtype=np.float64) + np.array(x),
    "detached by hand": lambda x: torch.from_numpy(np.floor(x.detach().numpy())),
    "torch": lambda x: torch.floor(x).clone(),
    "its input": lambda x: x,
    "a part of its input": lambda x: x[x > 1],
}


@pytest.mark.parametrize("kind", FORWARDS)
def test_each_runs_once_and_gives_plain_tensors(kind):
    calls = []

    def forward(x):
        calls.append(1)
        return FORWARDS[kind](x)

    x = X.clone().requires_grad_()
    y = gp.apply(lambda grad, inputs, output: torch.full_like(inputs[0], 3.0), forward, x)
    assert calls == [1]
    assert type(y) is torch.Tensor
    expected = (
        FORWARDS[kind](X if kind in ("torch", "its input", "a part of its input") else X.numpy())
        if (kind != "detached by hand")
        else torch.floor(X)
    )
    torch.testing.assert_close(y.detach(), torch.as_tensor(expected).to(y.dtype))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_a_random_draw_and_a_side_effect_happen_once_and_the_error_is_the_forward_s_own():
    drawn = []

    def forward(x):
        drawn.append(np.random.default_rng(len(drawn)).random())
        return x.astype(np.float32).no_such_method()

    with pytest.raises(AttributeError, match="no_such_method"):
        gp.apply("identity", forward, X)
    assert len(drawn) == 1


@pytest.mark.parametrize("forward", [np.floor, lambda x: x.astype(np.float64), lambda x: x[::-1].copy()])
def test_arrays_of_bfloat16_are_float32(forward):
    x = torch.tensor([0.5, 1.5], dtype=torch.bfloat16, requires_grad=True)
    y = gp.apply("identity", forward, x)
    assert torch.equal(y.detach().double(), torch.as_tensor(forward(x.detach().float().numpy())).double())
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("numpy", "kind"), [(True, np.ndarray), (False, torch.Tensor)])
def test_a_person_may_say_which(numpy, kind):
    seen = []

    def forward(x, pair):
        seen.extend([type(x), type(pair["y"])])
        return x * 2

    assert torch.equal(gp.apply("identity", forward, X, numpy=numpy, pair={"y": X}), 2 * X)
    assert seen == [kind, kind]


def test_what_neither_has_is_named():
    with pytest.raises(AttributeError, match="neither a tensor nor an array has 'colour'"):
        gp.apply("identity", lambda x: x.colour, X)


@pytest.mark.parametrize("rule", ["torch.sin", torch.sin, "sin"])
def test_another_operation_gives_the_gradient_in_apply_policies_and_overrides(rule):
    x = X.clone().requires_grad_()
    gp.apply(rule, np.floor, x).sum().backward()
    torch.testing.assert_close(x.grad, torch.cos(X))
    x.grad = None
    with gp.gradient_override({"floor": rule}):
        torch.floor(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.cos(X))
    x.grad = None

    class Floor(torch.nn.Module):
        def forward(self, x):
            return torch.floor(x)

    for policy in (gp.UseRule(rule, ops=["floor"]), gp.StraightThrough(rule, modules="*")):
        x.grad = None
        with gp.install(model := Floor(), [policy]):
            model(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.cos(X))
    check = gp.gradcheck_rule(rule, torch.sin, X)
    assert check.exact


def test_a_bare_name_that_is_both_means_the_rule_and_a_path_the_operation():
    assert gp.UseRule("sigmoid", ops="round").rule.name == "sigmoid"
    assert gp.UseRule("torch.sigmoid", ops="round").rule.name == "derivative of sigmoid"
    assert gp.UseRule("torch.nn.functional.gelu", ops="relu").rule.name == "derivative of gelu"


@pytest.mark.parametrize("path", ["torch.sine", "torch.load", "torch.save", "torch.hub.load"])
def test_a_path_to_no_operation_is_refused(path):
    with pytest.raises(gp.PolicyError, match=f"UseRule.rule: unknown operation '{path}'"):
        gp.UseRule(path, ops="round")
