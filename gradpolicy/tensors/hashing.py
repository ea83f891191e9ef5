"""Random numbers that need no state: integer hashes of (seed, step, name, index).

Every rank, every device and every resumed run gets the same bits, and any part of a tensor can be had
without the rest. The 32-bit finalizer is Wellons' ``triple32`` (Hash Prospector, public domain), with the
second half of the key added between its rounds, so that two keys never give shifted copies of one stream.
"""

import ctypes
import functools
import zlib
from pathlib import Path

import torch
from torch import Tensor

from gradpolicy.compiling import compiled

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_SHIFTS = (17, 11, 15, 14)
# Entries hashed at a time: on a CPU small enough that a chunk's words stay in a core's cache.
_CPU_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 26


def mix(value: int) -> int:
    """Return 64 scrambled bits (the finalizer of splitmix64; Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _LONG
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LONG
    return value ^ (value >> 31)


def derive(*parts: int | str) -> int:
    """Return one 64-bit key of whole numbers and names; the order of the parts counts.

    Example:
        >>> derive(0, "fc.weight") == derive(0, "fc.weight"), derive(0, "a") == derive(1, "a")
        (True, False)
    """
    key = 0
    for part in parts:
        word = zlib.crc32(part.encode()) | (len(part) << 32) if isinstance(part, str) else int(part) & _LONG
        key = mix(key ^ mix(word))
    return key


def content(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def shuffled(items: int, *parts: int | str) -> list[int]:
    """Return a permutation of ``range(items)`` that depends on the parts alone."""
    return sorted(range(items), key=lambda item: (derive(*parts, item), item))


def bernoulli(key: int, density: float, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    """Draws independent coins for the indices from start to stop.

    Args:
        key: 64 bits, as :func:`derive` gives them.
        density: The chance of True, to 2⁻³² exact.
        start: First index.
        stop: The index after the last.
        device: The device of the result. The bits are the same on every device.

    Returns:
        A bool tensor of ``stop - start`` entries.
    """
    drawn = torch.empty(max(stop - start, 0), dtype=torch.bool, device=device)
    threshold = round(density * 2.0**32)
    if threshold > _WORD or threshold <= 0:
        return drawn.fill_(threshold > 0)
    library = _library() if drawn.device.type == "cpu" else None
    for first, last, segment_key in _segments(key, start, stop):
        part = drawn[first - start : last - start]
        if library is None:
            _draw(part, first, segment_key, threshold)
        else:
            threads = torch.get_num_threads()
            library.gradpolicy_draw(
                part.data_ptr(), part.numel(), first & _WORD, *segment_key, threshold, threads
            )
    return drawn


def words_at(key: int, indices: Tensor) -> Tensor:
    """Return the words that :func:`bernoulli` compares with its threshold, at some indices.

    Args:
        key: 64 bits, as :func:`derive` gives them.
        indices: Indices (int64), ascending.

    Returns:
        Whole numbers in [0, 2³²) as float64, on the device of the indices.
    """
    indices = indices.contiguous()
    words = indices.to(torch.int32)
    for first, last, segment_key in _segments(key, 0, int(indices[-1]) + 1 if len(indices) else 0):
        begin, end = torch.searchsorted(indices, indices.new_tensor([first, last])).tolist()
        _scramble(words[begin:end], segment_key)
    return (words.to(torch.int64) & _WORD).double()


def _segments(key: int, start: int, stop: int) -> list[tuple[int, int, tuple[int, int]]]:
    """Cuts a range of indices where their upper 32 bits change; each piece gets a key of its own."""
    pieces = []
    while start < stop:
        upper = start >> 32
        last = min(stop, (upper + 1) << 32)
        piece_key = mix(key ^ upper) if upper else key
        pieces.append((start, last, (piece_key & _WORD, piece_key >> 32)))
        start = last
    return pieces


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return hashing.c, compiled; None if that cannot be done."""
    library = compiled(Path(__file__).with_name("hashing.c"))
    if library is not None:
        word = ctypes.c_uint32
        arguments = (ctypes.c_void_p, ctypes.c_int64, word, word, word, word, ctypes.c_int32)
        library.gradpolicy_draw.argtypes = arguments
        library.gradpolicy_draw.restype = None
    return library


def _draw(out: Tensor, first: int, key: tuple[int, int], threshold: int) -> None:
    """Writes True for each index from ``first`` on whose hash is below the threshold."""
    size = _CPU_CHUNK if out.device.type == "cpu" else _DEVICE_CHUNK
    for begin in range(0, out.numel(), size):
        part = out[begin : begin + size]
        words = torch.arange(part.numel(), dtype=torch.int32, device=out.device)
        _scramble(words.add_(_signed(first + begin)), key)
        # Flipping the sign bit makes the signed order that of the unsigned words.
        torch.lt(words.bitwise_xor_(-(1 << 31)), _signed(threshold ^ (1 << 31)), out=part)


def _scramble(words: Tensor, key: tuple[int, int]) -> None:
    """Replaces indices by their hashes in place, in wrapping signed words, which every device has."""
    words.bitwise_xor_(_signed(key[0]))
    for turn, (shift, multiplier) in enumerate(zip(_SHIFTS[:3], _MULTIPLIERS, strict=True)):
        _fold(words, shift).mul_(_signed(multiplier))
        if turn == 0:
            words.add_(_signed(key[1]))
    _fold(words, _SHIFTS[3])


def _fold(words: Tensor, shift: int) -> Tensor:
    """``words ^= words >>> shift`` with zeros shifted in."""
    return words.bitwise_xor_((words >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    """Return the signed 32-bit number of the same bits."""
    word &= _WORD
    return word - (1 << 32) if word >> 31 else word
