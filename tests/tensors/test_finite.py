"""Numbers are finite or not, whatever their dtype and layout."""

import itertools

import pytest
import torch

from gradpolicy.tensors.sharding import finite_everywhere


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_one_entry_that_is_not_finite_is_found_anywhere(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert finite_everywhere(
        [torch.tensor([largest, -largest, 0.0], dtype=dtype), torch.zeros(0, dtype=dtype)]
    )
    for bad, place in itertools.product((torch.nan, torch.inf, -torch.inf), (0, 31, 62)):
        spoilt = torch.randn(7, 9).to(dtype)
        spoilt.view(-1)[place] = bad
        assert not finite_everywhere([torch.zeros(3), spoilt.T])
