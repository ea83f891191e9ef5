"""Numbers are finite or not, whatever their dtype and layout."""

import pytest
import torch

from gradpolicy.finite import all_finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_however_large_are_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert all_finite([torch.tensor([largest, -largest, 0.0], dtype=dtype), torch.zeros(0, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_entry_that_is_not_finite_is_found_anywhere(dtype: torch.dtype, bad: float) -> None:
    for place in (0, 31, 62):
        spoilt = torch.randn(7, 9).to(dtype)
        spoilt.view(-1)[place] = bad
        for layout in (spoilt, spoilt.T):
            assert not all_finite([torch.zeros(3), layout])


def test_nothing_is_finite() -> None:
    assert all_finite([])
