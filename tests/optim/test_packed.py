import pytest
import torch

from gradpolicy.optim.native import moves as native
from gradpolicy.optim.native.moves import GRAIN
from gradpolicy.optim.packed import SPARE, Held


def random_flags(size, share):
    return torch.rand(size) < share


def first_flags(size, share):
    return torch.arange(size) < round(share * size)


def last_flags(size, share):
    return first_flags(size, share).flip(0)


def alternating_flags(size, share):
    """As many in all, ever more and ever less to the left of a place."""
    return torch.rand(size) < share * (1 + (torch.arange(size) / GRAIN).sin())


KINDS = [random_flags, first_flags, last_flags, alternating_flags]


@pytest.mark.parametrize("new", KINDS)
@pytest.mark.parametrize("old", KINDS)
@pytest.mark.parametrize(
    ("dtype", "newcomer"), [(torch.int8, -77), (torch.bfloat16, 0), (torch.float32, 0), (torch.float64, 0)]
)
@pytest.mark.parametrize("size", [1, 100, 5 * GRAIN + 77])
def test_moves_take_what_stays_and_start_the_others_anew(machinery, size, dtype, newcomer, old, new):
    torch.manual_seed(0)
    before, after = old(size, 0.5), new(size, 0.5)
    values = torch.randint(1, 100, (size,)).to(dtype)
    held = Held(before, 1)
    moved = held.move(held.pack(values), Held(after, 1), newcomer)
    assert torch.equal(moved, values.masked_fill(~before, newcomer)[after])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_vectors_move_together_as_each_alone(count, share, dtype):
    size = 12 * GRAIN + 77
    before, after = Held(random_flags(size, share), 1), Held(random_flags(size, share), 1)
    codes = torch.randint(-128, 0, (before.count,), dtype=torch.int8)
    vectors = [(codes, -77), *((torch.rand(before.count).to(dtype), 0) for _ in range(count - 1))]
    alone = [before.move(vector.clone(), after, newcomer) for vector, newcomer in vectors]
    assert all(map(torch.equal, before.move_together(vectors, after), alone))


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_masks_of_the_same_density_are_moved_between_in_the_same_memory():
    first, *others = (Held(random_flags(10 * GRAIN, 0.3), 1) for _ in range(4))
    packed = first.pack(torch.rand(10 * GRAIN))
    place, held = packed.data_ptr(), first
    for other in others:
        packed, held = held.move(packed, other), other
        assert packed.data_ptr() == place
        assert packed.untyped_storage().nbytes() <= 4 * held.count * (1 + 2 / SPARE)


def test_a_much_smaller_mask_gives_memory_back():
    large, small = (Held(random_flags(10 * GRAIN, share), 1) for share in (0.5, 0.1))
    packed = large.move(large.pack(torch.rand(10 * GRAIN)), small)
    assert packed.untyped_storage().nbytes() <= 4 * small.count * (1 + 2 / SPARE)
