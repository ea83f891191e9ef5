"""Random numbers that need no state: integer hashes of (seed, step, name, index).

Every rank, every device and every resumed run gets the same bits, and any part of a tensor can be had
without the rest. The 32-bit finalizer is Wellons' ``triple32`` (Hash Prospector, public domain), with the
second half of the key added between its rounds, so that two keys never give shifted copies of one stream.
"""

import ctypes
import functools
import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradpolicy.machinery import jitting, launching
from gradpolicy.machinery.compiling import compiled
from gradpolicy.masks.selection import highest

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_SHIFTS = (17, 11, 15, 14)
# Entries hashed at a time: small enough that a chunk's words stay in a core's cache.
_CPU_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 26
# Entries a thread draws at once in numba's loop.
_LOOP_PART = 1 << 18
# From so many entries on, compiled code is worth being compiled.
_MANY = 1 << 20


def mix(value: int) -> int:
    """Scrambles 64 bits (the finalizer of splitmix64; Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _LONG
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LONG
    return value ^ (value >> 31)


def derive(*parts: int | str) -> int:
    """Makes one 64-bit key of whole numbers and names; the order of the parts counts.

    Example:
        >>> derive(0, "fc.weight") == derive(0, "fc.weight"), derive(0, "a") == derive(1, "a")
        (True, False)
    """
    key = 0
    for part in parts:
        word = zlib.crc32(part.encode()) | (len(part) << 32) if isinstance(part, str) else int(part) & _LONG
        key = mix(key ^ mix(word))
    return key


def shuffled(items: int, *parts: int | str) -> list[int]:
    """A permutation of ``range(items)`` that depends on the parts alone."""
    return sorted(range(items), key=lambda item: (derive(*parts, item), item))


def bernoulli(key: int, density: float, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    """Draws independent coins for the indices from start to stop.

    Args:
        key: 64 bits, as :func:`derive` gives them.
        density: The chance of True, to 2⁻³² exact.
        start: First index.
        stop: The index after the last.
        device: Where the result lies. The bits are the same on every device.

    Returns:
        A bool tensor of ``stop - start`` entries.
    """
    drawn = torch.empty(max(stop - start, 0), dtype=torch.bool, device=device)
    threshold = round(density * 2.0**32)
    if threshold > _WORD or threshold <= 0:
        return drawn.fill_(threshold > 0)
    for first, last, word_key in _segments(key, start, stop):
        part = drawn[first - start : last - start]
        if _below_kernel(part, first & _WORD, word_key, threshold):
            continue
        if drawn.device.type != "cpu":
            _below_device(part, first & _WORD, word_key, threshold)
        elif part.numel() < _MANY or not (
            _below_compiled(part, first & _WORD, word_key, threshold)
            or _below_jitted(part.numpy(), first & _WORD, word_key, threshold)
        ):
            _below_cpu(part.numpy(), first & _WORD, word_key, threshold)
    return drawn


def words_at(key: int, places: Tensor) -> Tensor:
    """The words that :func:`bernoulli` compares with its threshold, at some indices.

    Args:
        key: 64 bits, as :func:`derive` gives them.
        places: Indices (int64), ascending.

    Returns:
        Whole numbers in [0, 2³²) as float64, on the places' device.
    """
    indices = places.cpu().numpy()
    words = indices.astype(np.uint32)
    for first, last, word_key in _segments(key, 0, int(indices[-1]) + 1 if indices.size else 0):
        part = words[slice(*np.searchsorted(indices, (first, last)))]
        _scramble(part, np.empty_like(part), word_key)
    return torch.from_numpy(words.astype(np.float64)).to(places.device)


def highest_words(key: int, among: Tensor, count: int) -> Tensor:
    """The places of the entries with the highest words, in ascending order; of equal words the first.

    Args:
        key: 64 bits.
        among: Which entries take part, a flat bool tensor.
        count: How many are wanted.
    """
    candidates = int(torch.count_nonzero(among))
    share = count / max(candidates, 1)
    # Coins leave few words to compare; a little more than wanted, so that they nearly always suffice.
    share += 6.0 * math.sqrt(share / max(candidates, 1))
    while True:
        low = bernoulli(key, max(1.0 - share, 0.0), 0, among.numel(), among.device)
        places = (among & ~low).nonzero().flatten()
        if len(places) >= count or share >= 1.0:
            return places[highest(words_at(key, places), count)]
        share *= 2.0


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


def _hash_cpu(count: int, first: int, key: tuple[int, int], scratch: np.ndarray) -> np.ndarray:
    """The hash of ``count`` indices, in the first row of the scratch space."""
    words, shifted = scratch[0, :count], scratch[1, :count]
    words[:] = np.arange(first, first + count, dtype=np.int64).astype(np.uint32)
    return _scramble(words, shifted, key)


def _scramble(words: np.ndarray, shifted: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Replaces indices by their hashes, in place."""
    words ^= np.uint32(key[0])
    for turn, (shift, multiplier) in enumerate(zip(_SHIFTS[:3], _MULTIPLIERS, strict=True)):
        np.right_shift(words, shift, out=shifted)
        words ^= shifted
        words *= np.uint32(multiplier)
        if turn == 0:
            words += np.uint32(key[1])
    np.right_shift(words, _SHIFTS[3], out=shifted)
    words ^= shifted
    return words


@functools.cache
def _kernel() -> ctypes.CDLL | None:
    source = Path(__file__).with_name("hashing.c")
    library = compiled(source)
    if library is not None:
        word = ctypes.c_uint32
        kinds = (ctypes.c_void_p, ctypes.c_int64, word, word, word, word, ctypes.c_int32)
        library.gradpolicy_draw.argtypes = kinds
        library.gradpolicy_draw.restype = None
    return library


def _below_compiled(out: Tensor, first: int, key: tuple[int, int], threshold: int) -> bool:
    """The same by hashing.c; False where it could not be compiled."""
    library = _kernel()
    if library is None:
        return False
    threads = torch.get_num_threads()
    library.gradpolicy_draw(out.data_ptr(), out.numel(), first, *key, threshold, threads)
    return True


def _below_jitted(out: np.ndarray, first: int, key: tuple[int, int], threshold: int) -> bool:
    """The same by hashing_loop.py; False where numba cannot be had."""
    loops = jitting.loops("gradpolicy.tensors.hashing_loop")
    if loops is None:
        return False
    words = [np.uint32(word) for word in (first, *key, threshold)]
    jitting.in_parallel(list(jitting.parts(loops.draw, out, *words, size=out.size, part=_LOOP_PART)))
    return True


def _below_cpu(out: np.ndarray, first: int, key: tuple[int, int], threshold: int) -> None:
    """Writes whether each hash lies below the threshold; numpy's loops run beside each other in threads."""

    def fill(begin: int, end: int) -> None:
        scratch = np.empty((2, min(_CPU_CHUNK, end - begin)), np.uint32)
        for chunk in range(begin, end, _CPU_CHUNK):
            count = min(_CPU_CHUNK, end - chunk)
            words = _hash_cpu(count, first + chunk, key, scratch)
            np.less(words, np.uint32(threshold), out=out[chunk : chunk + count])

    workers = min(torch.get_num_threads(), -(-out.size // (4 * _CPU_CHUNK)))
    if workers <= 1:
        fill(0, out.size)
        return
    edges = [out.size * worker // workers for worker in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(fill, edges[:-1], edges[1:]))


def _below_kernel(out: Tensor, first: int, key: tuple[int, int], threshold: int) -> bool:
    """The same by hashing_kernel.py; False where there is no GPU, or no Triton for it."""
    if not launching.serve(out):
        return False
    source = launching.module("gradpolicy.tensors.hashing_kernel")
    assert source is not None
    programs = -(-out.numel() // int(source.TILE.value))
    arguments = (out.view(torch.uint8), out.numel(), first, *key, threshold)
    return launching.launch(source.draw, programs, out.device, *arguments)


def _below_device(out: Tensor, first: int, key: tuple[int, int], threshold: int) -> None:
    """The same arithmetic in wrapping signed words, which every device has."""
    for chunk in range(0, out.numel(), _DEVICE_CHUNK):
        part = out[chunk : chunk + _DEVICE_CHUNK]
        words = torch.arange(part.numel(), dtype=torch.int32, device=out.device)
        words.add_(_signed(first + chunk)).bitwise_xor_(_signed(key[0]))
        for turn, (shift, multiplier) in enumerate(zip(_SHIFTS[:3], _MULTIPLIERS, strict=True)):
            _fold(words, shift).mul_(_signed(multiplier))
            if turn == 0:
                words.add_(_signed(key[1]))
        _fold(words, _SHIFTS[3])
        # Flipping the sign bit makes the signed order that of the unsigned words.
        torch.lt(words.bitwise_xor_(-(1 << 31)), _signed(threshold ^ (1 << 31)), out=part)


def _fold(words: Tensor, shift: int) -> Tensor:
    """``words ^= words >>> shift`` with zeros shifted in."""
    return words.bitwise_xor_((words >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    """The signed 32-bit number of the same bits."""
    word &= _WORD
    return word - (1 << 32) if word >> 31 else word
