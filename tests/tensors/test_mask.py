"""What a mask may be, and what is done with masks in whatever form they come."""

import pytest
import torch

from gradpolicy.errors import PolicyError
from gradpolicy.tensors.mask import (
    active_entries,
    as_tensor,
    check_mask,
    intersect,
    mask_from_state,
    mask_to_state,
)
from gradpolicy.tensors.seeded import RandomMask

SHAPE = (4, 3)
ROWS = torch.tensor([[True], [False], [True], [False]])
ENTRIES = torch.arange(12).reshape(SHAPE) % 3 == 0
SEEDED = RandomMask(1, 2, "w", 0.5)
MASKS = {"all": True, "none": False, "rows": ROWS, "entries": ENTRIES, "seeded": SEEDED}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_what_fits_is_given_back_as_it_is(mask) -> None:
    assert check_mask(mask, torch.zeros(SHAPE), "'w'") is mask
    assert check_mask(mask, torch.zeros(SHAPE, device="meta"), "'w'") is mask


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "expected True, False, a bool tensor or a RandomMask, got None"),
        (torch.ones(SHAPE), "expected a bool tensor"),
        (ENTRIES.to_sparse(), "expected a dense tensor"),
        (torch.empty(SHAPE, dtype=torch.bool, device="meta"), "the mask is on the meta device"),
        (ENTRIES.T, r"shape \(3, 4\) does not broadcast to .* give \(4, 3\) for entries, \(4, 1\) for rows"),
        (ENTRIES[None], r"shape \(1, 4, 3\) does not broadcast"),
    ],
)
def test_what_does_not_fit_is_an_error(mask, message: str) -> None:
    with pytest.raises(PolicyError, match=f"^mask of 'w': {message}"):
        check_mask(mask, torch.zeros(SHAPE), "'w'")


@pytest.mark.parametrize("one", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("other", MASKS.values(), ids=MASKS)
def test_an_intersection_is_active_where_both_are(one, other) -> None:
    expected = as_tensor(one, SHAPE).expand(SHAPE) & as_tensor(other, SHAPE).expand(SHAPE)
    both = intersect(one, other, SHAPE)
    assert torch.equal(as_tensor(both, SHAPE).expand(SHAPE), expected)
    assert active_entries(both, SHAPE) == int(expected.sum())


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_survives_a_checkpoint(mask, tmp_path) -> None:
    torch.save(mask_to_state(mask), tmp_path / "mask.pt")
    restored = mask_from_state(torch.load(tmp_path / "mask.pt", weights_only=True))
    assert type(restored) is type(mask)
    assert torch.equal(as_tensor(restored, SHAPE), as_tensor(mask, SHAPE))
