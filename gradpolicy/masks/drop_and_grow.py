"""One exchange of a sparse topology: which entries stay, which are grown, and with which values."""

import math

import torch
from torch import Tensor

from gradpolicy.masks.selection import highest
from gradpolicy.tensors.hashing import bernoulli, words_at

DROPS = ("magnitude", "sign")


def kept_entries(active: Tensor, weight: Tensor, fraction: float, target: int, drop: str) -> Tensor:
    """Return the active entries that are not dropped.

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
    weight = weight.flatten()
    indices = active.flatten().nonzero().flatten()
    if len(indices) > target:
        indices = indices[highest(weight[indices].abs(), target)]
    parts = [indices]
    if drop == "sign":
        negative = weight[indices] < 0
        parts = [indices[negative], indices[~negative]]
    kept = torch.zeros_like(active).flatten()
    for part in parts:
        stay = highest(weight[part].abs(), len(part) - int(len(part) * fraction))
        kept[part[stay]] = True
    return kept.reshape(active.shape)


def grown_entries(kept: Tensor, gradient: Tensor, target: int) -> Tensor:
    """Return the entries with the largest ``|gradient|`` that are not kept, until ``target`` are active.

    Args:
        kept: Which entries are active already.
        gradient: Of the same shape, without NaN.
        target: How many entries are active then.
    """
    wanted = target - int(torch.count_nonzero(kept))
    if wanted >= kept.numel() - (target - wanted):
        return ~kept
    return highest(gradient.abs().masked_fill_(kept, -1.0), wanted)


def grown_at_random(kept: Tensor, key: int, target: int) -> Tensor:
    """As many entries as :func:`grown_entries`, any of those that are not kept."""
    wanted = target - int(torch.count_nonzero(kept))
    return _marked(_highest_words(key, ~kept.flatten(), wanted), kept)


def normal_values(key: int, indices: Tensor, deviation: float) -> Tensor:
    """Normal values with mean 0, of the key and each index alone, the same on every device.

    Args:
        key: 64 bits.
        indices: Flat indices, ascending.
        deviation: The standard deviation.

    Returns:
        A float64 tensor, one value an index.
    """
    # Computed where every process computes alike: erfinv differs between devices in its last bits.
    words = words_at(key, indices.cpu())
    drawn = math.sqrt(2.0) * deviation * torch.erfinv((2.0 * words + 1.0) / 2.0**32 - 1.0)
    return drawn.to(indices.device)


def _marked(indices: Tensor, like: Tensor) -> Tensor:
    """Flags of a shape, set at some flat indices."""
    marks = torch.zeros_like(like).flatten()
    marks[indices] = True
    return marks.reshape(like.shape)


def _highest_words(key: int, among: Tensor, count: int) -> Tensor:
    """Return the indices of the entries with the highest words, in ascending order; of equal words the first.

    Args:
        key: 64 bits.
        among: Which entries take part (bool, 1-D).
        count: How many are wanted.
    """
    candidates = int(torch.count_nonzero(among))
    share = count / max(candidates, 1)
    # Coins leave few words to compare; a little more than wanted, so that they nearly always suffice.
    share += 6.0 * math.sqrt(share / max(candidates, 1))
    while True:
        low = bernoulli(key, max(1.0 - share, 0.0), 0, among.numel(), among.device)
        indices = (among & ~low).nonzero().flatten()
        if len(indices) >= count or share >= 1.0:
            return indices[highest(words_at(key, indices), count)]
        share *= 2.0
