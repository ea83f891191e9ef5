"""RowGradient: a gradient that holds some rows alone, and what torch does with it."""

import pytest
import torch
from torch import Tensor, nn

from gradpolicy.tensors.row_gradient import ActiveRows, RowGradient

ROWS = torch.tensor([1, 3])


@pytest.fixture(params=[0, 1, None], ids=["rows", "columns", "entries"])
def gradient(request: pytest.FixtureRequest) -> RowGradient:
    """Two rows, columns or entries of a gradient of 4 x 5 entries."""
    rows, shape = ActiveRows(ROWS, request.param), torch.Size((4, 5))
    values = torch.randn(rows.shape(shape), generator=torch.Generator().manual_seed(0))
    return RowGradient(values, *rows, shape)


def parameter_with(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape))
    parameter.grad = gradient
    return parameter


def test_rows_that_are_not_held_are_zero(gradient: RowGradient) -> None:
    dense = gradient.dense()
    assert torch.equal(gradient.rows.select(dense), gradient.held)
    assert dense.count_nonzero() == gradient.held.count_nonzero()


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_clipping_by_norm_equals_that_of_the_dense_gradient(gradient: RowGradient, order: float) -> None:
    other = torch.ones(3)
    parameters = [parameter_with(gradient), parameter_with(other.clone())]
    plain = [parameter_with(gradient.dense()), parameter_with(other.clone())]
    norm, wanted = (nn.utils.clip_grad_norm_(each, 0.5, norm_type=order) for each in (parameters, plain))
    torch.testing.assert_close(norm, wanted)
    assert isinstance(parameters[0].grad, RowGradient)
    torch.testing.assert_close(parameters[0].grad.dense(), plain[0].grad)


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_unscaling_divides_the_rows_and_finds_what_is_not_finite(value: float) -> None:
    parameter = nn.Parameter(torch.zeros(4, 5))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    parameter.grad = RowGradient(torch.full((2, 5), value), ROWS, 0, parameter.shape)
    scaler.unscale_(optimizer)
    torch.testing.assert_close(parameter.grad.held, torch.full((2, 5), value / 4), equal_nan=True)
    (found,) = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    assert bool(found) is not (value == 1.0)
