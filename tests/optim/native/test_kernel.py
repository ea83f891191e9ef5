"""The C kernel, with the processor's vectors and without, does what plain torch does."""

import ctypes
import timeit
from pathlib import Path

import pytest
import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.machinery import compiling
from gradpolicy.optim.native import moves as native
from gradpolicy.optim.packed import Held

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
SIZES = [1, 31, 100, 3 * native.GRAIN + 77]


@pytest.fixture(scope="module")
def plain_library():
    """The kernel compiled for any processor of this kind."""
    flags = [flag for flag in compiling.FLAGS if not flag.startswith("-march")]
    path = compiling._build(Path(native.__file__).with_name("kernel.c"), compiling.compiler(), tuple(flags))
    return native.declared(ctypes.CDLL(str(path)))


@pytest.fixture(params=["vectors", "plain C"])
def kernel(request, monkeypatch, plain_library):
    if request.param == "plain C":
        monkeypatch.setattr(native, "library", lambda: plain_library)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("size", SIZES)
def test_a_survey_counts_compares_and_indexes(size):
    flags, other = torch.rand(size) < 0.5, torch.rand(size) < 0.5
    codes = torch.where(other, -128, 5).to(torch.int8)
    bits, offsets, _ = native.index(codes)
    assert torch.equal(Held(codes, 1).flags(), other)
    assert torch.equal(offsets.diff(), torch.stack([part.sum() for part in other.split(native.GRAIN)]))
    looks = (lambda new: native.survey(new, codes), lambda new: native.index_many([(new, bits)])[0])
    for look in looks:
        assert look(other).same
        assert look(flags).same is torch.equal(flags, other)
        if size > 1:
            last = other.clone()
            last[-1] = ~last[-1]
            assert look(last).same is False
    assert native.survey(flags).count == native.count(flags) == flags.sum()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["flags", "codes", "bits"])
def test_many_vectors_are_cleared_at_once(kind, dtype):
    vectors, expected = [], []
    for size in SIZES:
        for block in (1,) if kind == "bits" else (1, 27):
            active, flat = torch.rand(size) < 0.5, torch.full((size * block,), float("nan"), dtype=dtype)
            told = {"flags": active, "codes": torch.where(active, -7, 7).to(torch.int8)}.get(kind)
            vectors.append((flat, Held(active, 1).bits if told is None else told, block))
            expected.append(active.repeat_interleave(block))
    assert native.clear(vectors)
    for (flat, _, _), active in zip(vectors, expected, strict=True):
        assert torch.equal(flat.isnan(), active)
        assert torch.equal(flat == 0, ~active)


def test_bfloat16_is_updated_by_vectors_too():
    fastest = []
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.randn(1 << 18).to(dtype))
        weight.grad = torch.randn_like(weight)
        optimizer = MaskedOptimizer(torch.optim.AdamW([weight]))
        optimizer.set_mask(weight, torch.rand(1 << 18) < 0.5)
        fastest.append(min(timeit.repeat(optimizer.step, number=1, repeat=20)))
    # Some three times where compilers make vector code, fifteen where they test each entry.
    assert fastest[1] < 8 * fastest[0]


@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("shape", [(700, 27), (300, 64), (3, 40001)])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_vectors_and_plain_c_give_the_same_bits(monkeypatch, plain_library, frozen_state, shape, amsgrad):
    ends = []
    for library in (native.library, lambda: plain_library):
        monkeypatch.setattr(native, "library", library)
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(shape))
        inner = torch.optim.AdamW([parameter], lr=0.1, amsgrad=amsgrad)
        optimizer = MaskedOptimizer(inner, frozen_state=frozen_state)
        for change in range(9):
            rows = change % 3 == 2
            optimizer.set_mask(parameter, torch.rand((shape[0], 1) if rows else shape) < 0.5)
            parameter.grad = torch.randn(shape)
            optimizer.step()
        ends.append([parameter.detach(), *optimizer.state_dict()["state"][0].values()])
    assert all(map(torch.equal, *ends))
