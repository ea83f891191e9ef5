import pytest
import torch

from gradpolicy.optim.native import moves as native
from gradpolicy.optim.native.moves import GRAIN
from gradpolicy.optim.packed import FEW, Held, _spare, index_many, move_many


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
    (together,) = move_many([(before, after, vectors)])
    assert all(map(torch.equal, together, alone))


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_masks_of_the_same_density_are_moved_between_in_the_same_memory():
    first, *others = (Held(random_flags(10 * GRAIN, 0.3), 1) for _ in range(4))
    packed = first.pack(torch.rand(10 * GRAIN))
    place, held = packed.untyped_storage().data_ptr(), first
    for other in others:
        packed, held = held.move(packed, other), other
        assert packed.untyped_storage().data_ptr() == place
        assert packed.untyped_storage().nbytes() <= 4 * (held.count + 2 * _spare(held.count, held.size))


def values_at(start, values, room):
    """`values` in the midst of memory of their own."""
    memory = torch.zeros(room, dtype=values.dtype)
    memory[start : start + len(values)] = values
    return memory


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("shift", [-4 * GRAIN, -GRAIN, -3, 0, 5, GRAIN, 4 * GRAIN])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.2), (0.05, 0.95), (1.0, 1.0)])
@pytest.mark.parametrize("halves", [False, True], ids=["even", "uneven"])
def test_new_values_may_begin_anywhere_in_the_memory_of_the_old_ones(halves, shares, shift, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    size, start = 12 * GRAIN + 77, 4 * GRAIN
    before, after = (random_flags(size, share) for share in shares)
    if halves:
        before[: size // 2], after[size // 2 :] = False, False
    old, new = Held(before, 1), Held(after, 1)
    codes, moment = torch.randint(-128, 0, (old.count,), dtype=torch.int8), torch.rand(old.count)
    expected = [old.move(codes.clone(), new, -77), old.move(moment.clone(), new)]
    memory = [values_at(start, values, start + size + 4 * GRAIN) for values in (codes, moment)]
    results = [part[start + shift :][: new.count] for part in memory]
    moves = [
        (part[start:][: old.count], result, newcomer)
        for part, result, newcomer in zip(memory, results, (-77, 0), strict=True)
    ]
    assert native.repack([(old._index, new._index, moves, size)])
    assert all(map(torch.equal, results, expected))


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_streams_that_are_shifted_differently_are_moved_too():
    size = 6 * GRAIN
    old, new = (Held(random_flags(size, 0.5), 1) for _ in range(2))
    vectors = [torch.rand(old.count) for _ in range(2)]
    expected = [old.move(values.clone(), new) for values in vectors]
    memory = [values_at(GRAIN, values, size) for values in vectors]
    results = [part[start:][: new.count] for part, start in zip(memory, (0, 2 * GRAIN), strict=True)]
    moves = [(part[GRAIN:][: old.count], result, 0) for part, result in zip(memory, results, strict=True)]
    assert native.repack([(old._index, new._index, moves, size)])
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("size", [FEW - 77, FEW, 40 * GRAIN])
@pytest.mark.parametrize("share", [0.1, 0.6, 0.9])
def test_what_is_held_to_spare_is_little(size, share):
    assert _spare(round(share * size), size) < 0.2 * share * size


@pytest.mark.parametrize("size", [FEW // 2, FEW, 64 * GRAIN])
@pytest.mark.parametrize("share", [0.1, 0.6, 0.9])
def test_many_masks_in_turn_leave_the_values_of_what_stays(share, size):
    first, second = (Held(random_flags(size, share), 1) for _ in range(2))
    values = torch.rand(size)
    packed, kept = first.pack(values), first.flags() & second.flags()
    for _ in range(2):
        packed = second.move(first.move(packed, second), first)
    assert torch.equal(packed, first.pack(values * kept))


def test_a_much_smaller_mask_gives_memory_back():
    large, small = (Held(random_flags(10 * GRAIN, share), 1) for share in (0.5, 0.1))
    packed = large.move(large.pack(torch.rand(10 * GRAIN)), small)
    assert packed.untyped_storage().nbytes() <= 4 * (small.count + 2 * _spare(small.count, small.size))


def test_many_tensors_are_moved_as_each_alone(machinery):
    torch.manual_seed(0)
    sizes = (1, 64, 3 * GRAIN, FEW, 20 * GRAIN + 5)
    moves, expected = [], []
    for size in sizes:
        old, new = (Held(random_flags(size, 0.6), 1) for _ in range(2))
        codes, moment = torch.randint(-128, 0, (old.count,), dtype=torch.int8), old.pack(torch.rand(size))
        expected += [old.move(codes.clone(), new, -77), old.move(moment.clone(), new)]
        moves.append((old, new, [(codes, -77), (moment, 0)]))
    moved = [vector for vectors in move_many(moves) for vector in vectors]
    assert all(map(torch.equal, moved, expected))


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_indices_of_many_tensors_are_those_of_each():
    flags = [random_flags(size, 0.3) for size in (1, 9, GRAIN, 5 * GRAIN + 3)]
    known = [
        Held(random_flags(each.numel(), 0.3) if place % 2 else each, 1) for place, each in enumerate(flags)
    ]
    for each, held, found in zip(flags, known, index_many(list(zip(known, flags, strict=True))), strict=True):
        own = Held(each, 1)
        assert found.count == each.sum()
        assert found.same is torch.equal(held.flags(), each)
        assert all(map(torch.equal, found.index[:2], own._index[:2]))
