"""A fingerprint changes with every bit, and with nothing else."""

import pytest
import torch

from gradpolicy.insight import fingerprints
from gradpolicy.insight.fingerprints import fingerprint, words

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64)


def print_of(tensor, chosen=None):
    return int(fingerprint(words(tensor), chosen))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128, torch.int64, torch.int8])
def test_each_bit_of_each_entry_counts(dtype):
    tensor = torch.randn(6).mul(3).to(dtype)
    raw = tensor.view(torch.uint8)
    seen = {print_of(tensor)}
    for byte in range(raw.numel()):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            seen.add(print_of(tensor))
            raw[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * raw.numel()
    assert print_of(tensor) in seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [2, 4, 4096, 9000])
def test_flipped_signs_do_not_cancel(dtype, count):
    changed = torch.zeros(10_000).to(dtype)
    before = print_of(changed)
    size = changed.element_size()
    changed.view(torch.uint8)[size - 1 : count * size : size] ^= 0x80
    assert print_of(changed) != before


def test_nan_equals_itself_and_differs_from_another_nan():
    bits = torch.tensor([0x7FC00000, 0x7FC00000], dtype=torch.int32)
    nan, other = (
        bits.view(torch.float32),
        (bits + torch.tensor([0, 1], dtype=torch.int32)).view(torch.float32),
    )
    assert print_of(nan) == print_of(nan.clone())
    assert print_of(nan) != print_of(other)


@pytest.mark.parametrize("distance", [1, 4096, 8192, 5000])
def test_entries_that_change_places_count(distance):
    tensor = torch.randn(20_000)
    swapped = tensor.clone()
    swapped[[0, distance]] = tensor[[distance, 0]]
    assert print_of(tensor) != print_of(swapped)


def test_only_chosen_entries_count():
    tensor = torch.randn(10_000)
    chosen = torch.rand(10_000) < 0.5
    changed = torch.where(chosen, tensor, tensor + 1)
    assert print_of(tensor, chosen) == print_of(changed, chosen)
    assert print_of(tensor, chosen) != print_of(torch.where(chosen, tensor + 1, tensor), chosen)


def test_a_long_tensor_is_summed_in_spans(monkeypatch):
    tensor = torch.randn(3 * 4096 + 17)
    whole = print_of(tensor)
    monkeypatch.setattr(fingerprints, "_SPAN", 4096)
    assert print_of(tensor) == whole


def test_how_a_tensor_lies_in_memory_does_not_count():
    tensor = torch.randn(6, 8)
    assert print_of(tensor.T.contiguous().T) == print_of(tensor)
    assert print_of(torch.zeros(())) == 0
    assert words(torch.zeros(0, 3)).shape == (0, 1)
