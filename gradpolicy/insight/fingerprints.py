"""Fingerprints of tensors: one whole number that tells whether any bit has changed."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# Integers of at most 32 bits, by the bytes of an entry. The highest bit of a 64-bit word would reach only
# that of the sum, where two flipped signs would cancel.
_WORDS = {1: torch.uint8, 2: torch.int16}
_COLUMNS = 1 << 12
# Words that are widened to 64 bits at a time.
_SPAN = 1 << 22
_ROW_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


def words(tensor: Tensor) -> Tensor:
    """Reads the bits of a tensor as integers, so that 0.0 and −0.0 differ and NaN equals itself.

    Args:
        tensor: Any dtype and shape; dense.

    Returns:
        Integers of at most 32 bits, of shape (entries, words an entry).

    Example:
        >>> words(torch.tensor([0.0, -0.0])).tolist()
        [[0], [-2147483648]]
    """
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_WORDS.get(flat.element_size(), torch.int32))
    return bits.view(flat.numel(), max(flat.element_size() // 4, 1))


def fingerprint(bits: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Mixes words into one number.

    ``Σ_ij row_i · factor_j · word_ij  mod 2⁶⁴`` over the words in rows of 4096, with odd row numbers and odd
    random factors. One changed word always changes it, since odd numbers have an inverse mod 2⁶⁴. Where
    several have changed or changed places it stays the same with a chance of about 2⁻³².

    Args:
        bits: What :func:`words` gave.
        chosen: Which entries count (bool, 1-D); all unless given.

    Returns:
        An int64 scalar on the device of the bits, for which nothing had to wait.

    Source: multilinear hashing; Carter, Wegman 1979; Lemire, Kaser 2014, arXiv:1202.4961.

    Example:
        >>> before, after = torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0])
        >>> bool(fingerprint(words(before)) == fingerprint(words(after)))
        False
    """
    if chosen is not None:
        bits = torch.where(chosen[:, None], bits, bits.new_zeros(()))
    flat = bits.reshape(-1)
    factors = _factors(flat.device)
    if flat.numel() <= _COLUMNS:
        return (flat * factors[: flat.numel()]).sum()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, flat.numel(), _SPAN):
        part = flat[first : first + _SPAN]
        rows = F.pad(part, (0, -part.numel() % _COLUMNS)).view(-1, _COLUMNS)
        sums = (rows * factors).sum(1)
        number = torch.arange(len(sums), device=flat.device) + first // _COLUMNS
        total += (sums * (2 * number * _ROW_FACTOR + 1)).sum()
    return total


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Odd random numbers, the same on every device."""
    bounds = torch.iinfo(torch.int64)
    drawn = torch.randint(
        bounds.min, bounds.max, (_COLUMNS,), generator=torch.Generator().manual_seed(0), dtype=torch.int64
    )
    return (drawn | 1).to(device)
