import pytest
import torch
import torch.distributed as dist
from process_pool import ProcessPool, here, refusal

from gradpolicy.tensors.seeded import RandomMask
from gradpolicy.train.agreement import check_agreement, checksum

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
