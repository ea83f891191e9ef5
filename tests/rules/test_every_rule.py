"""Properties of every built-in rule, whatever its formula."""

import dataclasses
import functools
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpolicy import Call, get_rule, rule_names
from gradpolicy.flow.operations import derivative_of, resolve_operation

BUILT_IN = [
    name for name in rule_names() if get_rule(name).function.__module__.startswith("gradpolicy.rules.")
]
# What each rule needs: its numbers; its inputs, where these are not one tensor of any values.
NUMBERS = {
    "scale": {"factor": 0.5},
    "reverse": {"factor": 2.0},
    "clip_value": {"value": 0.7, "loss_scale": 2.0},
    "clip_norm": {"norm": 0.7, "loss_scale": 2.0},
    "normalize": {"norm": 0.7, "loss_scale": 2.0},
    # What is random has tests of its own.
    "noise": {"std": 0.0},
    "hardtanh": {"minimum": -0.5, "maximum": 0.5},
    "tanh": {"slope": 2.0},
    "sigmoid": {"slope": 2.0},
    "fast_sigmoid": {"slope": 3.0},
    "arctan": {"alpha": 1.5},
    "triangular": {"height": 0.3, "width": 2.0},
    "swish_sign": {"beta": 3.0},
    "bernoulli": {"slope": 2.0},
    "gumbel": {"temperature": 0.7},
    "reinmax": {"temperature": 1.3},
}
OF_WHOLE_TENSORS = ("clip_norm", "normalize")


def example(name, dtype=torch.float64, shape=(3, 4)):
    """A gradient, inputs and an output that the rule can take."""
    generator = torch.Generator().manual_seed(5)
    grad, x = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    inputs = [x.sigmoid() if name == "bernoulli" else x]
    output = x.relu()
    if name in ("lsq", "lsq_plus", "pact"):
        inputs.append(torch.tensor(0.6, dtype=torch.float64))
    if name == "lsq_plus":
        inputs.append(torch.tensor(-0.25, dtype=torch.float64))
    if name == "gate":
        inputs.append(x > 0)
    if name in ("gumbel", "reinmax"):
        output = torch.nn.functional.one_hot(x.argmax(-1), shape[-1]).double()
    if name == "rotation":
        output = x.flip(-1)
    cast = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs]
    return grad.to(dtype), tuple(cast), output.to(dtype)


def as_tuple(returned):
    return returned if isinstance(returned, tuple) else (returned,)


def configured(name):
    rule = get_rule(name, **NUMBERS.get(name, {}))
    if not rule.takes_call:
        return rule
    call = Call("relu", {}, derivative_of(resolve_operation("relu")).function)
    return dataclasses.replace(rule, function=functools.partial(rule.function, call=call))


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_docstring_has_formula_source_and_example(name):
    text = inspect.getdoc(get_rule(name).function)
    for part in ("forward", "backward", "Source:", "Example:"):
        assert part in text, f"the docstring of {name!r} lacks {part!r}: see those of the rules beside it"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", BUILT_IN)
def test_lower_precision_agrees_with_double_precision(name, dtype):
    rule = configured(name)
    reduced = example(name, dtype)
    double = [tensor.double() if tensor.is_floating_point() else tensor for tensor in reduced[1]]
    reference = as_tuple(rule(reduced[0].double(), tuple(double), reduced[2].double()))
    got = as_tuple(rule(*reduced))
    tolerance = 8 * torch.finfo(dtype).eps
    assert {part.dtype for part in got if part is not None} == {dtype}
    torch.testing.assert_close(got, reference, check_dtype=False, rtol=tolerance, atol=tolerance)


@settings(max_examples=15)
@given(
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("gumbel", "reinmax")])
def test_gradients_have_the_shape_and_dtype_of_the_inputs(name, shape, dtype):
    arguments = example(name, dtype, shape)
    for gradient, tensor in zip(as_tuple(configured(name)(*arguments)), arguments[1], strict=True):
        if tensor.is_floating_point():
            assert gradient.shape == tensor.shape
            assert gradient.dtype == dtype
        else:
            assert gradient is None


@pytest.mark.parametrize("name", BUILT_IN)
def test_rules_read_only_what_they_say(name):
    """Values that a rule does not read are not kept for the backward pass."""
    rule = configured(name)
    grad, inputs, output = example(name)
    if "inputs" not in rule.reads:
        inputs = tuple(torch.full_like(tensor, torch.nan) for tensor in inputs)
    if "output" not in rule.reads:
        output = torch.full_like(output, torch.nan)
    torch.testing.assert_close(rule(grad, inputs, output), rule(*example(name)), rtol=0, atol=0)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_rule_itself_is_differentiable(name):
    """Double backward: in the incoming gradient, and in the inputs where the formula has them."""
    grad, inputs, output = example(name)
    rule = configured(name)

    def total(grad, first):
        gradients = [part for part in as_tuple(rule(grad, (first, *inputs[1:]), output)) if part is not None]
        return tuple(part + 0 * grad.sum() + 0 * first.sum() for part in gradients)

    points = (grad.clone().requires_grad_(), inputs[0].clone().requires_grad_())
    assert torch.autograd.gradcheck(total, points, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in OF_WHOLE_TENSORS])
def test_vmap_is_the_rule_applied_to_each(name):
    grad, inputs, output = example(name)
    rule = configured(name)
    places = tuple(0 if tensor.dim() else None for tensor in inputs)
    mapped = torch.vmap(lambda grad, inputs, output: as_tuple(rule(grad, inputs, output))[0], (0, places, 0))
    alone = [
        as_tuple(rule(grad[row], tuple(x[row] if x.dim() else x for x in inputs), output[row]))[0]
        for row in range(len(grad))
    ]
    torch.testing.assert_close(mapped(grad, inputs, output), torch.stack(alone))
