import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpolicy import get_rule

NUMBERS = [2.0, torch.tensor(2.0)]


@pytest.mark.parametrize("value", NUMBERS)
def test_clip_value_bounds_each_entry(apply_rule, value):
    grad = torch.tensor([-5.0, -1.0, 0.0, 1.5, math.inf])
    assert apply_rule("clip_value", grad, grad, value=value).tolist() == [-2.0, -1.0, 0.0, 1.5, 2.0]


@pytest.mark.parametrize("norm", NUMBERS)
def test_clip_norm_shortens_to_the_length_and_keeps_the_direction(apply_rule, norm):
    grad = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(apply_rule("clip_norm", grad, grad, norm=norm), torch.tensor([1.2, 1.6]))


def test_clip_norm_leaves_what_is_short_enough(apply_rule):
    grad = torch.tensor([0.3, -0.4])
    assert torch.equal(apply_rule("clip_norm", grad, grad, norm=1.0), grad)
    assert torch.equal(apply_rule("clip_norm", grad, grad * 0, norm=1.0), grad * 0)


def test_clip_norm_agrees_with_torch_over_a_whole_tensor(apply_rule):
    grad = torch.randn(4, 5, dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_([parameter], 1.5)
    torch.testing.assert_close(
        apply_rule("clip_norm", grad, grad, norm=1.5), parameter.grad, rtol=1e-6, atol=1e-6
    )


def test_per_sample_bounds_each_row_by_itself(apply_rule):
    grad = torch.stack([torch.full((2, 3), 10.0), torch.full((2, 3), 0.1)])
    clipped = apply_rule("clip_norm", grad, grad, norm=1.0, per_sample=True)
    torch.testing.assert_close(clipped[0].norm(), torch.tensor(1.0))
    assert torch.equal(clipped[1], grad[1])


def test_one_sample_that_is_not_finite_passes_and_leaves_the_others_alone(apply_rule):
    grad = torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [30.0, 40.0]])
    clipped = apply_rule("clip_norm", grad, grad, norm=1.0, per_sample=True)
    assert torch.equal(clipped[0], grad[0])
    assert clipped[1].isnan().tolist() == [True, False]
    torch.testing.assert_close(clipped[2], torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 1e30), (torch.float16, 6e4), (torch.bfloat16, 1e30)]
)
def test_a_gradient_whose_square_overflows_is_shortened_all_the_same(apply_rule, dtype, size):
    grad = torch.full((50,), size, dtype=dtype)
    clipped = apply_rule("clip_norm", grad, grad, norm=1.0)
    assert clipped.dtype == dtype
    assert float(clipped.double().norm()) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("scale", [1024.0, torch.tensor(1024.0)])
@pytest.mark.parametrize(
    ("name", "parameters"), [("clip_norm", {"norm": 0.5}), ("clip_value", {"value": 0.5})]
)
def test_thresholds_follow_the_loss_scale(apply_rule, name, parameters, scale):
    grad = torch.randn(20)
    plain = apply_rule(name, grad, grad, **parameters)
    scaled = apply_rule(name, grad, grad * 1024, **parameters, loss_scale=scale)
    torch.testing.assert_close(scaled / 1024, plain)


@pytest.mark.parametrize("scale", [65536.0, torch.tensor(65536.0)])
def test_a_bound_beyond_half_precision_bounds_nothing(apply_rule, scale):
    grad = torch.tensor([6e4, -math.inf], dtype=torch.float16)
    assert torch.equal(apply_rule("clip_value", grad, grad, value=10.0, loss_scale=scale), grad)


def test_empty_and_scalar_gradients(apply_rule):
    empty = torch.zeros(0, 3)
    assert apply_rule("clip_norm", empty, empty, norm=1.0, per_sample=True).shape == (0, 3)
    scalar = torch.tensor(-5.0)
    assert apply_rule("clip_norm", scalar, scalar, norm=1.0, per_sample=True).item() == -1.0


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    exponent=st.integers(-6, 6),
    per_sample=st.booleans(),
)
def test_no_length_exceeds_the_bound(shape, exponent, per_sample):
    grad = torch.randn(shape, dtype=torch.float64) * 10.0**exponent
    clipped = get_rule("clip_norm", norm=0.7, per_sample=per_sample)(grad, (grad,), grad)
    rows = clipped.reshape(shape[0], -1) if per_sample else clipped.reshape(1, -1)
    assert bool((rows.norm(dim=1) <= 0.7 * (1 + 1e-12)).all())


@pytest.mark.parametrize("norm", NUMBERS)
def test_normalize_gives_a_short_and_a_long_gradient_the_same_length(apply_rule, norm):
    for size in (1e-4, 1.0, 1e4):
        grad = size * torch.tensor([3.0, 4.0])
        torch.testing.assert_close(
            apply_rule("normalize", grad, grad, norm=norm), torch.tensor([1.2, 1.6]), rtol=1e-6, atol=0
        )


def test_normalize_leaves_zeros_and_what_is_not_finite(apply_rule):
    for grad in (torch.zeros(2, 2), torch.tensor([[math.inf, 1.0]]), torch.zeros(0, 3)):
        assert torch.equal(apply_rule("normalize", grad, grad), grad)


def test_normalize_per_sample_gives_each_row_the_length(apply_rule):
    grad = torch.randn(4, 2, 3, dtype=torch.float64)
    found = apply_rule("normalize", grad, grad, norm=0.5, per_sample=True)
    expected = 0.5 * grad / grad.flatten(1).norm(dim=1).view(4, 1, 1)
    torch.testing.assert_close(found, expected)


def test_normalize_follows_the_loss_scale_and_small_numbers_do_not_vanish(apply_rule):
    grad = torch.full((4,), 1e-30)
    torch.testing.assert_close(apply_rule("normalize", grad, grad), torch.full((4,), 0.5))
    torch.testing.assert_close(apply_rule("normalize", grad, grad, loss_scale=8.0), torch.full((4,), 4.0))
