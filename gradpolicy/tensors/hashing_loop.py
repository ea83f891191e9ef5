"""Coins from hashed indices in a loop that numba compiles: the arithmetic of hashing.py."""

import numpy as np

from gradpolicy.machinery.jitting import loop


@loop
def draw(drawn, first, low, high, threshold, start, stop):  # type: ignore[no-untyped-def]
    """Flags start..stop-1: whether the hash of first + start and so on lies below the threshold."""
    for i in range(np.uintp(start), np.uintp(stop)):
        word = np.uint32(np.uint32(first + np.uint32(i)) ^ low)
        word = np.uint32(np.uint32((word ^ (word >> np.uint32(17))) * np.uint32(0xED5AD4BB)) + high)
        word = np.uint32((word ^ (word >> np.uint32(11))) * np.uint32(0xAC4C1B51))
        word = np.uint32((word ^ (word >> np.uint32(15))) * np.uint32(0x31848BAB))
        drawn[i] = np.uint32(word ^ (word >> np.uint32(14))) < threshold
