"""Random masks and keys from integer hashes of (seed, step, name, index).

Every rank, device and resumed run gets the same bits, and a slice of a tensor can be drawn without the rest.
The 32-bit finalizer is Wellons' ``triple32`` (Hash Prospector, public domain), with the second half of the
key added between its rounds, so that two keys never give shifted copies of the same stream.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradpolicy.checks import check_choice
from gradpolicy.errors import PolicyError, shown
from gradpolicy.tensors.pattern import Pattern, pattern_of

LEVELS = ("entry", "row", "tensor")
_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_SHIFTS = (17, 11, 15, 14)
# Entries hashed at a time: on a CPU small enough that a chunk's words stay in a core's cache.
_CPU_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 26


def check_level(key: str, level: object) -> str:
    """Check a level: ``"entry"``, ``"row"``, ``"tensor"``, N of M (``"2:4"``) or blocks (``"16x16"``).

    Raises:
        PolicyError: For any other value.
    """
    if pattern_of(level) is not None:
        return str(level)
    return check_choice(key, level, (*LEVELS, "2:4", "16x16"))


@dataclass(frozen=True)
class RandomMask:
    """A random mask that is drawn on demand, so that checkpoints need not store it.

    Each entry, row or tensor is active with probability ``density``, independently; the bits depend only on
    (seed, step, name, index) and are the same on every device.

    Attributes:
        seed: The run's seed, or the mask source's own.
        step: The effective step (or epoch) at which the mask was drawn.
        name: The parameter's name.
        density: The probability of being active, from 0 to 1.
        level: The unit that is drawn: ``"entry"``, ``"row"`` (an index of the first dimension), ``"tensor"``,
            N of M or blocks.

    Example:
        >>> mask = RandomMask(seed=0, step=40, name="fc.weight", density=0.5)
        >>> bool((mask.materialize((8, 4)) == mask.materialize((8, 4))).all())
        True
    """

    seed: int
    step: int
    name: str
    density: float
    level: str = "entry"

    def __post_init__(self) -> None:
        check_level("RandomMask.level", self.level)
        if not 0.0 <= self.density <= 1.0:
            raise PolicyError(f"RandomMask.density: must lie between 0 and 1, got {shown(self.density)}")

    def materialize(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the mask.

        Args:
            shape: The parameter's shape.
            device: The device of the mask.

        Returns:
            A bool tensor: of the shape for entries and patterns, ``(n, 1, …)`` for ``"row"``, ``(1, 1, …)``
            for ``"tensor"``.
        """
        shape, key = tuple(shape), derive(self.seed, self.step, self.name)
        pattern = pattern_of(self.level)
        if pattern is not None:
            return self._of_pattern(pattern, key, shape).to(device)
        drawn = {"entry": len(shape), "row": 1, "tensor": 0}[self.level]
        units = (*shape[:drawn], *(1,) * (len(shape) - drawn))
        return bernoulli(key, self.density, 0, math.prod(units), device).reshape(units)

    def _of_pattern(self, pattern: Pattern, key: int, shape: tuple[int, ...]) -> Tensor:
        """Return a mask of N of M, or of blocks."""
        pattern.check(self.name, shape)
        rows, width = shape[0], math.prod(shape[1:])
        if pattern.kept is None:
            blocks = rows // pattern.rows, width // pattern.columns
            return pattern.spread(bernoulli(key, self.density, 0, math.prod(blocks)).reshape(blocks), shape)
        size, step = rows * width, max(_CPU_CHUNK // width, 1) * width
        parts = (torch.arange(at, min(at + step, size), device="cpu") for at in range(0, size, step))
        return torch.cat([pattern.best(words_at(key, part)) for part in parts]).reshape(shape)


def mix(value: int) -> int:
    """Return 64 scrambled bits (the finalizer of splitmix64; Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _LONG
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LONG
    return value ^ (value >> 31)


def derive(*parts: int | str) -> int:
    """Return a 64-bit key derived from integers and names; the order of the parts matters.

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
    """Return a permutation of ``range(items)`` that depends only on the parts."""
    return sorted(range(items), key=lambda item: (derive(*parts, item), item))


def bernoulli(key: int, density: float, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw a bool for each index from start to stop, independently.

    Args:
        key: 64 bits, from :func:`derive`.
        density: The probability of True, exact to 2⁻³².
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
    _draw(drawn, start, _halves(key, stop), threshold)
    return drawn


def words_at(key: int, indices: Tensor) -> Tensor:
    """Return the hashes that :func:`bernoulli` compares with its threshold, at some indices.

    Args:
        key: 64 bits, from :func:`derive`.
        indices: Indices (int64), ascending.

    Returns:
        Integers in [0, 2³²) as float64, on the device of the indices.
    """
    words = indices.to(torch.int32)
    _scramble(words, _halves(key, int(indices[-1]) + 1 if len(indices) else 0))
    return (words.to(torch.int64) & _WORD).double()


def _halves(key: int, stop: int) -> tuple[int, int]:
    """Return the lower and upper 32 bits of a key that draws for indices below ``stop``.

    Raises:
        PolicyError: If there are more indices than 32 bits count.
    """
    if stop > 1 << 32:
        raise PolicyError(f"a random mask: expected at most 2^32 entries, got {stop:,}; use level='row'")
    return key & _WORD, key >> 32


def _draw(out: Tensor, first: int, key: tuple[int, int], threshold: int) -> None:
    """Write True for each index from ``first`` on whose hash is below the threshold."""
    size = _CPU_CHUNK if out.device.type == "cpu" else _DEVICE_CHUNK
    for begin in range(0, out.numel(), size):
        part = out[begin : begin + size]
        words = torch.arange(part.numel(), dtype=torch.int32, device=out.device)
        _scramble(words.add_(_signed(first + begin)), key)
        # Flipping the sign bit makes the signed order that of the unsigned words.
        torch.lt(words.bitwise_xor_(-(1 << 31)), _signed(threshold ^ (1 << 31)), out=part)


def _scramble(words: Tensor, key: tuple[int, int]) -> None:
    """Replace indices by their hashes in place, in signed words that wrap around, as on every device."""
    words.bitwise_xor_(_signed(key[0]))
    for turn, (shift, multiplier) in enumerate(zip(_SHIFTS[:3], _MULTIPLIERS, strict=True)):
        _fold(words, shift).mul_(_signed(multiplier))
        if turn == 0:
            words.add_(_signed(key[1]))
    _fold(words, _SHIFTS[3])


def _fold(words: Tensor, shift: int) -> Tensor:
    """Compute ``words ^= words >>> shift`` in place, with zeros shifted in."""
    return words.bitwise_xor_((words >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    """Return the signed 32-bit integer with the same bits."""
    word &= _WORD
    return word - (1 << 32) if word >> 31 else word
