"""Masks in files: a bit a flag, or positions where these take less."""

import io

import pytest
import torch

from gradpolicy.tensors.packed_mask import as_bits, pack, pack_masks, unpack, unpack_masks


@pytest.mark.parametrize("count", [0, 1, 7, 8, 1000, 4097])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 1.0])
def test_a_mask_comes_back_and_takes_a_bit_a_flag_or_four_bytes_a_set_one(count, share):
    flags = torch.rand(count, generator=torch.Generator().manual_seed(0)) < share
    packed = pack(flags)
    assert torch.equal(unpack(packed, count), flags)
    active = int(flags.sum())
    assert packed.nbytes == (4 * active if 32 * active < count else 8 * -(-count // 64))
    assert torch.equal(unpack(as_bits(packed, count), count), flags)


def test_equal_masks_are_written_once_and_others_are_kept_apart():
    flags = torch.arange(80_000) % 2 == 0
    state = {"first": flags, "second": [flags.clone().view(200, 400)], "third": ~flags, "name": "x"}
    file = io.BytesIO()
    torch.save(pack_masks(state), file)
    assert file.tell() < 2.3 * 80_000 / 8
    file.seek(0)
    loaded = unpack_masks(torch.load(file, weights_only=True))
    assert loaded["name"] == "x"
    assert torch.equal(loaded["first"], flags)
    assert torch.equal(loaded["second"][0], state["second"][0])
    assert torch.equal(loaded["third"], ~flags)
