"""Rules that bound or set the size of the gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpolicy import get_rule


@settings(max_examples=60)
@given(
    name=st.sampled_from(["clip_norm", "normalize"]),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    exponent=st.integers(-6, 6),
    per_sample=st.booleans(),
    as_tensor=st.booleans(),
)
def test_clip_norm_and_normalize(name, shape, exponent, per_sample, as_tensor):
    grad = torch.randn(shape, dtype=torch.float64) * 10.0**exponent
    rows = grad.reshape(shape[0], -1) if per_sample else grad.reshape(1, -1)
    lengths = rows.norm(dim=1, keepdim=True)
    factor = 0.7 / lengths if name == "normalize" else (0.7 / lengths).clamp(max=1.0)
    norm = torch.tensor(0.7, dtype=torch.float64) if as_tensor else 0.7
    found = get_rule(name, norm=norm, per_sample=per_sample)(grad, (grad,), grad)
    torch.testing.assert_close(found, (rows * factor).reshape(shape), rtol=1e-12, atol=0)
    if name == "clip_norm" and not per_sample and lengths < 0.7:
        assert torch.equal(found, grad)


def test_non_finite_samples_pass(apply_rule):
    grad = torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [30.0, 40.0], [0.0, 0.0]])
    for name in ("clip_norm", "normalize"):
        clipped = apply_rule(name, grad, grad, norm=1.0, per_sample=True)
        assert torch.equal(clipped[0], grad[0])
        assert clipped[1].isnan().tolist() == [True, False]
        torch.testing.assert_close(clipped[2:], torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


@pytest.mark.parametrize("name", ["clip_norm", "normalize"])
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 1e30), (torch.float16, 6e4), (torch.bfloat16, 1e30)]
)
def test_clips_where_squares_overflow(apply_rule, name, dtype, size):
    grad = torch.full((50,), size, dtype=dtype)
    clipped = apply_rule(name, grad, grad, norm=1.0)
    assert clipped.dtype == dtype
    assert float(clipped.double().norm()) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("clip_norm", {"norm": 0.5}), ("clip_value", {"value": 0.5}), ("normalize", {"norm": 0.5})],
)
def test_thresholds_follow_the_loss_scale(apply_rule, name, parameters):
    grad = torch.randn(20)
    plain = apply_rule(name, grad, grad, **parameters)
    scaled = apply_rule(name, grad, grad * 1024, **parameters, loss_scale=1024.0)
    torch.testing.assert_close(scaled / 1024, plain)
