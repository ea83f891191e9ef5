"""The hash of hashing.py on a GPU, in Triton: nothing is read, and a byte written an index."""

import triton
import triton.language as tl

TILE = tl.constexpr(4096)
"""Indices a program."""


@triton.jit(do_not_specialize=["first", "low_key", "high_key", "threshold"])
def draw(out, size, first, low_key, high_key, threshold):
    """Write whether the hash of each index lies below the threshold.

    Args:
        out: a byte an index.
        size: how many indices.
        first: the first index.
        low_key: 32 bits.
        high_key: 32 bits.
        threshold: 32 bits.
    """
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    words = (first + places).to(tl.uint32) ^ low_key.to(tl.uint32)
    words = (words ^ (words >> 17)) * 0xED5AD4BB + high_key.to(tl.uint32)
    words = (words ^ (words >> 11)) * 0xAC4C1B51
    words = (words ^ (words >> 15)) * 0x31848BAB
    words ^= words >> 14
    tl.store(out + places, (words < threshold.to(tl.uint32)).to(tl.uint8), mask=places < size)
