"""Random numbers by hashing: each index as the formula has it, however it is computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpolicy.tensors import hashing

WORD = (1 << 32) - 1


def reference_hash(key: int, index: int) -> int:
    """The same hash in whole numbers of Python, one index at a time."""
    upper = index >> 32
    key = hashing.mix(key ^ upper) if upper else key
    word = (index & WORD) ^ (key & WORD)
    word = ((word ^ (word >> 17)) * 0xED5AD4BB + (key >> 32)) & WORD
    word = ((word ^ (word >> 11)) * 0xAC4C1B51) & WORD
    word = ((word ^ (word >> 15)) * 0x31848BAB) & WORD
    return word ^ (word >> 14)


@given(
    key=st.integers(0, (1 << 64) - 1),
    start=st.one_of(st.integers(0, 1000), st.integers((1 << 31) - 40, (1 << 33) + 40)),
    count=st.integers(0, 80),
    density=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_the_vector_hash_is_the_hash_of_each_index(key: int, start: int, count: int, density: float) -> None:
    drawn = hashing.bernoulli(key, density, start, start + count)
    threshold = round(density * 2**32)
    expected = [reference_hash(key, index) < threshold for index in range(start, start + count)]
    assert drawn.tolist() == expected


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("start", [0, WORD - 50, 9])
@pytest.mark.parametrize("density", [2.0**-32, 0.3, 0.5, 1 - 2.0**-32])
def test_without_a_compiler_the_bits_are_the_same(threads, start, density, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    stop = start + (1 << 19) + 77
    compiled = hashing.bernoulli(3, density, start, stop)
    monkeypatch.setattr(hashing, "_library", lambda: None)
    assert torch.equal(hashing.bernoulli(3, density, start, stop), compiled)


@given(
    key=st.integers(0, (1 << 64) - 1),
    places=st.lists(st.integers(0, (1 << 33) + 40) | st.integers((1 << 32) - 9, (1 << 32) + 9), max_size=20),
)
@settings(max_examples=40, deadline=None)
def test_the_words_of_chosen_indices_are_their_hashes(key: int, places: list[int]) -> None:
    ascending = sorted(places)
    words = hashing.words_at(key, torch.tensor(ascending, dtype=torch.int64))
    assert words.tolist() == [reference_hash(key, index) for index in ascending]


def test_shuffled_is_a_permutation_that_the_parts_decide() -> None:
    orders = [hashing.shuffled(8, 0, turn) for turn in range(50)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert hashing.shuffled(8, 0, 3) == orders[3]
    assert len({tuple(order) for order in orders}) > 45


def test_keys_are_those_of_splitmix64() -> None:
    """The first outputs of the published generator for the seeds 0 and 1."""
    assert (hashing.mix(0), hashing.mix(1)) == (0xE220A8397B1DCDAF, 0x910A2DEC89025CC1)


def test_the_same_parts_give_the_same_key_in_every_version() -> None:
    """A checkpoint holds the parts only."""
    assert hashing.derive(0, "fc.weight") == 0x370D75876069D8B1
    assert hashing.derive(-1, 3, "ü") == 0x8D08B82DF7C3B4F1
    assert hashing.shuffled(8, 0, 3) == [3, 0, 7, 4, 5, 6, 1, 2]
