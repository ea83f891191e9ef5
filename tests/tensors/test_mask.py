"""What is done with masks in whatever form they come."""

import pytest
import torch

from gradpolicy.tensors.mask import (
    as_tensor,
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


@pytest.mark.parametrize("one", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("other", MASKS.values(), ids=MASKS)
def test_an_intersection_is_active_where_both_are(one, other) -> None:
    expected = as_tensor(one, SHAPE).expand(SHAPE) & as_tensor(other, SHAPE).expand(SHAPE)
    both = intersect(one, other, SHAPE)
    assert torch.equal(as_tensor(both, SHAPE).expand(SHAPE), expected)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_survives_a_checkpoint(mask, tmp_path) -> None:
    torch.save(mask_to_state(mask), tmp_path / "mask.pt")
    restored = mask_from_state(torch.load(tmp_path / "mask.pt", weights_only=True))
    assert type(restored) is type(mask)
    assert torch.equal(as_tensor(restored, SHAPE), as_tensor(mask, SHAPE))
