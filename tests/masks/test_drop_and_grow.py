"""One exchange of a topology against the published rules."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gradpolicy.masks.drop_and_grow import grown_entries, kept_entries, normal_values


def exchange(mask: Tensor, weight: Tensor, gradient: Tensor, fraction: float, target: int) -> Tensor:
    kept = kept_entries(mask, weight, fraction, target, "magnitude")
    return kept | grown_entries(kept, gradient, target)


def published_mask(weight: np.ndarray, gradient: np.ndarray, mask: np.ndarray, fraction: float) -> np.ndarray:
    """RigL's: the highest ``|w|`` stay, of all others the highest ``|g|`` come."""
    active = int(mask.sum())
    pruned = int(active * fraction)
    kept = np.zeros(mask.size, dtype=bool)
    kept[np.argsort(-np.abs(weight).ravel(), kind="stable")[: active - pruned]] = True
    scores = np.where(kept, -1.0, np.abs(gradient).ravel())
    kept[np.argsort(-scores, kind="stable")[:pruned]] = True
    return kept.reshape(mask.shape)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_one_exchange_is_that_of_the_published_code(seed: int, fraction: float) -> None:
    torch.manual_seed(seed)
    mask = torch.rand(6, 5) < 0.4
    weight, gradient = torch.randn(6, 5) * mask, torch.randn(6, 5)
    expected = published_mask(weight.numpy(), gradient.numpy(), mask.numpy(), fraction)
    given = exchange(mask, weight, gradient, fraction, int(mask.sum()))
    assert np.array_equal(given.numpy(), expected)


def test_an_active_entry_of_weight_zero_stays_ahead_of_inactive_ones() -> None:
    """Where rigl-torch errs: a grown entry that is still zero ties with all inactive ones there."""
    mask = torch.tensor([False, False, True, True, True])
    weight = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0])
    given = exchange(mask, weight, torch.tensor([5.0, 4.0, 0.0, 0.0, 0.0]), 0.0, 3)
    assert torch.equal(given, mask)


def test_signs_lose_their_share_each() -> None:
    weight = torch.tensor([0.1, 0.2, 0.3, 0.4, -5.0, -6.0, -7.0, -8.0, 0.0])
    mask = weight != 0
    kept = kept_entries(mask, weight, 0.5, 8, "sign")
    assert kept.tolist() == [False, False, True, True, False, False, True, True, False]
    kept = kept_entries(mask, weight, 0.5, 8, "magnitude")
    assert kept.tolist() == [False] * 4 + [True] * 4 + [False]


@pytest.mark.parametrize("drop", ["magnitude", "sign"])
def test_a_lower_target_takes_the_smallest_away(drop: str) -> None:
    weight = torch.tensor([3.0, -1.0, 2.0, -4.0])
    kept = kept_entries(torch.ones(4, dtype=torch.bool), weight, 0.0, 2, drop)
    assert kept.tolist() == [True, False, False, True]


def test_values_of_grown_entries_are_normal_and_depend_on_key_and_place() -> None:
    places = torch.arange(0, 200_000, 2)
    values = normal_values(7, places, deviation=0.5)
    drawn = values / 0.5
    for moment, expected in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert drawn.pow(moment).mean().item() == pytest.approx(expected, abs=0.08)
    assert torch.equal(normal_values(7, places[30::5], 0.5), values[30::5])
    assert not torch.equal(normal_values(8, places, 0.5), values)
