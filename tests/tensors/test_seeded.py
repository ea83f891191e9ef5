"""Random masks: the same bits wherever they are drawn, by the published hash of each index."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpolicy.errors import PolicyError
from gradpolicy.tensors import seeded
from gradpolicy.tensors.seeded import RandomMask

WORD = (1 << 32) - 1


def reference_hash(key: int, index: int) -> int:
    """The same hash in whole numbers of Python, one index at a time."""
    word = index ^ (key & WORD)
    word = ((word ^ (word >> 17)) * 0xED5AD4BB + (key >> 32)) & WORD
    word = ((word ^ (word >> 11)) * 0xAC4C1B51) & WORD
    word = ((word ^ (word >> 15)) * 0x31848BAB) & WORD
    return word ^ (word >> 14)


@given(
    key=st.integers(0, (1 << 64) - 1),
    start=st.one_of(st.integers(0, 1000), st.integers((1 << 31) - 40, WORD - 80)),
    count=st.integers(0, 80),
    density=st.floats(0, 1),
)
@settings(max_examples=60)
def test_the_vector_hash_is_the_hash_of_each_index(key: int, start: int, count: int, density: float) -> None:
    drawn = seeded.bernoulli(key, density, start, start + count)
    threshold = round(density * 2**32)
    expected = [reference_hash(key, index) for index in range(start, start + count)]
    assert drawn.tolist() == [word < threshold for word in expected]
    # Chosen indices, with gaps between them.
    chosen = torch.tensor([0, *range(start, start + count, 3), WORD])
    words = seeded.words_at(key, chosen)
    assert words.tolist() == [reference_hash(key, index) for index in chosen.tolist()]


@pytest.mark.parametrize("start", [0, WORD - (1 << 18), 9])
def test_large_tensors_are_drawn_like_their_parts(start: int) -> None:
    stop = start + (1 << 17) + 77
    parts = [
        seeded.bernoulli(3, 0.3, first, min(first + 1000, stop)).tolist()
        for first in range(start, stop, 1000)
    ]
    assert seeded.bernoulli(3, 0.3, start, stop).tolist() == [bit for part in parts for bit in part]


def test_more_entries_than_32_bits_count_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"expected at most 2\^32 entries, got 4,294,967,297; use level"):
        RandomMask(0, 0, "w", 0.5).materialize((WORD + 2,), "meta")


def test_the_same_parts_give_the_same_key_in_every_version() -> None:
    """A checkpoint holds the parts only."""
    assert seeded.derive(0, "fc.weight") == 0x370D75876069D8B1
    assert seeded.derive(-1, 3, "ü") == 0x8D08B82DF7C3B4F1
    assert seeded.shuffled(8, 0, 3) == [3, 0, 7, 4, 5, 6, 1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_bits_of_the_cpu() -> None:
    mask = RandomMask(3, 40, "fc.weight", 0.3)
    assert torch.equal(mask.materialize((1000, 999), "cuda").cpu(), mask.materialize((1000, 999)))


@pytest.mark.parametrize("density", [0.001, 0.1, 0.5, 0.9])
def test_the_density_is_met_and_entries_are_independent(density: float) -> None:
    """Counts, neighbours and successive draws stay within five standard deviations of independent coins."""
    count = 400_000
    first, second = (RandomMask(0, step, "w", density).materialize((count,)).double() for step in (0, 1))
    deviation = math.sqrt(density * (1 - density) / count)
    assert abs(first.mean().item() - density) < 5 * deviation
    bound = 5 * density * (1 - density) / math.sqrt(count)
    centred = first - density
    for other in (second - density, centred.roll(1), centred.roll(64), centred.roll(1000)):
        assert abs((centred * other).mean().item()) < bound


def test_a_wrong_seeded_mask_says_what_is_wrong() -> None:
    with pytest.raises(PolicyError, match="level"):
        RandomMask(0, 0, "w", 0.5, "rows")
    with pytest.raises(PolicyError, match="between 0 and 1"):
        RandomMask(0, 0, "w", 1.5)


def test_the_same_numbers_give_the_same_mask_in_every_version() -> None:
    entries = RandomMask(0, 40, "fc.weight", 0.5).materialize((4, 8))
    drawn = ["".join("01"[bit] for bit in row) for row in entries.int().tolist()]
    assert drawn == ["10001000", "01110110", "00101000", "00101101"]
    rows = RandomMask(0, 40, "fc.weight", 0.5, "row").materialize((16, 8))
    assert "".join("01"[bit] for bit in rows.flatten().int().tolist()) == "1000100001110110"
