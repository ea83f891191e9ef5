"""Checks that all ranks hold the same masks, ages and weights, by exchanging a number."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gradpolicy.errors import PromiseError
from gradpolicy.tensors.seeded import derive

# The number of columns of 64-bit words; a prime, so that swapped rows of a matrix are in different columns.
_COLUMNS = 509
_ROW_BYTES = 8 * _COLUMNS


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of the bits of a tensor.

    The memory is read as 64-bit words, which are summed into columns (with wrap-around, so the order does not
    matter); the columns are weighted by random odd numbers. One changed bit always changes the result; two
    swapped entries do so unless their distance is a multiple of 4072 bytes.

    Args:
        tensor: A dense tensor of any dtype and shape.

    Returns:
        An int64 scalar on the tensor's device; equal on every device for equal bits in equal strides.
    """
    # Without a copy if the tensor is dense.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    memory = tensor.permute(order).contiguous().view(-1).view(torch.uint8)
    end = memory.numel() - memory.numel() % _ROW_BYTES
    rows = memory[:end] if memory.storage_offset() % 8 == 0 else memory[:end].clone()
    rest = memory.new_zeros(_ROW_BYTES)
    rest[: memory.numel() - end] = memory[end:]
    sums = rows.view(torch.int64).view(-1, _COLUMNS).sum(0) + rest.view(torch.int64)
    return (sums * _column_weights(tensor.device)).sum()


def check_agreement(tensors: Mapping[str, Any], *, group: Any = None, moment: str = "") -> None:
    """Check that all ranks have the same values, and raise an error on every rank if they differ.

    If they agree, each sends one number. Every rank of the group must call this.

    Args:
        tensors: The values that must be equal, by a descriptive name: tensors, or objects that are identified
            by their ``repr`` (a seeded mask, a number). The error names the first difference in this order.
        group: The process group; None for all ranks.
        moment: The time of the check for the message, such as ``"before update 300"``.

    Raises:
        PromiseError: On every rank, naming the first difference and the ranks that differ from the majority.

    Example:
        >>> check_agreement({"weight": torch.ones(3)})  # one process always agrees with itself
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    sums = _checksums(tensors)
    total = derive(*(part for name in sorted(sums) for part in (name, sums[name])))
    if len(set(of_every_rank(total, group))) > 1:
        _raise_difference(sums, group, moment)


def of_every_rank(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks in their order; without a process group, the value alone.

    Args:
        value: A picklable object.
        group: The process group; None for all ranks.
    """
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _raise_difference(sums: dict[str, int], group: Any, moment: str) -> None:
    """Exchange all checksums and name the first that differs."""
    everyone = of_every_rank(sums, group)
    names = list(dict.fromkeys(name for other in everyone for name in other))
    differing = [name for name in names if len({other.get(name) for other in everyone}) > 1]
    when = f" {moment}" if moment else ""
    seen = [other.get(differing[0]) for other in everyone]
    usual = max(seen, key=seen.count)
    members = dist.get_process_group_ranks(group)
    ranks = [str(members[index]) for index, value in enumerate(seen) if value != usual]
    raise PromiseError(
        f"the ranks disagree{when}: {differing[0]} differs on rank {', '.join(ranks)} from the others "
        f"({len(differing)} of {len(names)} checked differ)"
    )


def as_numbers(tree: Any) -> Any:
    """Return a tree with numbers in place of its tensors, by a single transfer from the accelerator."""
    tensors = [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
    numbers = iter(torch.stack([each.to(tensors[0].device) for each in tensors]).tolist() if tensors else ())
    return tree_map_only(Tensor, lambda _: next(numbers), tree)


def _checksums(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the checksums of tensors and of other values."""
    sums = {
        name: checksum(value.detach()) if isinstance(value, Tensor) else derive(repr(value))
        for name, value in values.items()
    }
    return as_numbers(sums)


@cache
def _column_weights(device: torch.device) -> Tensor:
    """Return random odd factors, one per column."""
    generator = torch.Generator().manual_seed(_COLUMNS)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (_COLUMNS,), generator=generator, device="cpu")
    return (words | 1).to(device)
