"""One exchange of a sparse topology: which entries stay, which are grown, and what these begin with."""

import math

import torch
from torch import Tensor

from gradpolicy.freeze.hashing import uniform
from gradpolicy.freeze.select import highest

DROPS = ("magnitude", "sign")


def kept_entries(active: Tensor, weight: Tensor, fraction: float, target: int, drop: str) -> Tensor:
    """The active entries that are not dropped.

    Args:
        active: The mask so far.
        weight: Values of the same shape.
        fraction: The share ``ζ`` to drop (rounded down).
        target: The most that may be active before the share is dropped; what has the smallest ``|w|`` goes.
        drop: ``"magnitude"``: the share with the smallest ``|w|``; ``"sign"``: the share of the positive
            entries that are smallest, and the share of the negative ones that are largest.

    Returns:
        The mask of what stays.
    """
    size = weight.abs()
    active = _largest(size, active, min(_count(active), target))
    groups = [active] if drop == "magnitude" else [active & (weight < 0), active & ~(weight < 0)]
    kept = torch.zeros_like(active)
    for group in groups:
        count = _count(group)
        kept |= _largest(size, group, count - int(count * fraction))
    return kept


def grown_entries(kept: Tensor, scores: Tensor, target: int) -> Tensor:
    """The entries with the highest scores among all that are not kept, until ``target`` are active."""
    return _largest(scores, ~kept, target - _count(kept))


def normal(key: int, grown: Tensor, deviation: float) -> Tensor:
    """Normal values for the grown entries, zero elsewhere; of the key and an entry's place alone.

    Args:
        key: 64 bits.
        grown: Which entries get a value.
        deviation: The standard deviation; the mean is 0.

    Returns:
        A float64 tensor of the same shape, the same on every device.
    """
    places = grown.flatten().nonzero().flatten()
    # Computed where every process computes alike: erfinv differs between devices in its last bits.
    words = uniform(key, grown.numel())[places.cpu()].double()
    drawn = math.sqrt(2.0) * deviation * torch.erfinv((2.0 * words + 1.0) / 2.0**32 - 1.0)
    values = torch.zeros(grown.numel(), dtype=torch.float64, device=grown.device)
    values[places] = drawn.to(grown.device)
    return values.reshape(grown.shape)


def _largest(scores: Tensor, among: Tensor, count: int) -> Tensor:
    """Marks the highest scores among some entries; of equal ones the first."""
    if count >= _count(among):
        return among
    marks = torch.zeros_like(among)
    marks[among] = highest(scores[among], count)
    return marks


def _count(marks: Tensor) -> int:
    return int(torch.count_nonzero(marks))
