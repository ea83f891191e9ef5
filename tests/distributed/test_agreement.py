import pytest
import torch
import torch.distributed as dist
from process_pool import ProcessPool, RemoteError, here, refusal

from gradpolicy.distributed.agreement import check_agreement, checksum
from gradpolicy.tensors.seeded import RandomMask

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64, torch.uint8, torch.int16]


def some(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 200
    return drawn > 100 if dtype == torch.bool else drawn.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (1000, 9), (64, 512)])
def test_one_changed_entry_changes_the_checksum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some(shape, dtype)
    for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
        other = tensor.clone()
        entry = other.view(-1)[place]
        entry.copy_(~entry if dtype == torch.bool else entry + 1)
        assert checksum(other) != checksum(tensor)
    assert checksum(tensor.clone()) == checksum(tensor)


def test_the_sign_of_any_float64_changes_the_checksum() -> None:
    tensor = some((1100,), torch.float64) + 1
    whole = checksum(tensor)
    for place in range(len(tensor)):
        tensor[place].neg_()
        assert checksum(tensor) != whole, place
        tensor[place].neg_()


def test_swapped_rows_change_the_checksum() -> None:
    tensor = some((8, 4096), torch.float32)
    assert checksum(tensor) != checksum(tensor[[1, 0, *range(2, 8)]])


def test_the_checksum_reads_a_tensor_where_it_lies() -> None:
    tensor = some((33, 6), torch.float32)
    assert checksum(tensor[1:]) == checksum(tensor[1:].clone()), "an offset that is no whole word"
    assert checksum(tensor[:, :3]) == checksum(tensor[:, :3].contiguous()), "not dense"
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(0, dtype=torch.int64))


def test_one_process_agrees_with_itself() -> None:
    assert check_agreement({"a": torch.ones(2)}) is None


def differing(fault: str) -> str:
    """Checks three entries, one of which may differ on rank 1; gives the message."""
    rank = dist.get_rank()
    held = {
        "mask of a.weight": torch.ones(40, 3, dtype=torch.bool, device=here()),
        "mask of b.weight": RandomMask(0, 40, "b.weight", 0.5),
        "a.weight": torch.arange(120.0, device=here()),
    }
    if rank == 1 and fault == "tensor":
        held["mask of a.weight"][17, 1] = False
        held["a.weight"][3] = 0.0
    if rank == 1 and fault == "seeded":
        held["mask of b.weight"] = RandomMask(0, 41, "b.weight", 0.5)
    if rank == 1 and fault == "missing":
        del held["mask of b.weight"]
    return refusal(check_agreement, held, moment="before update 40")


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("fault", "culprit"),
    [("tensor", "mask of a.weight"), ("seeded", "mask of b.weight"), ("missing", "mask of b.weight")],
)
def test_every_rank_names_the_first_difference(pair: ProcessPool, fault: str, culprit: str) -> None:
    messages = pair(differing, fault)
    assert messages[0] == messages[1]
    assert f"before update 40: {culprit} differs on rank 1" in messages[0]


def test_ranks_that_agree_go_on(pair: ProcessPool) -> None:
    assert pair(differing, "none") == ["", ""]


def failing() -> None:
    raise ValueError(f"on purpose, rank {dist.get_rank()}")


def test_the_pool_says_what_each_rank_raised(pair: ProcessPool) -> None:
    with pytest.raises(RemoteError, match="on purpose, rank 1"):
        pair(failing)
