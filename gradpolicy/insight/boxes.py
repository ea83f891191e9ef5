"""Boxes of tensors: small parts that are looked at in turns, and which of their entries are frozen."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradpolicy.optim.layout import local_mask
from gradpolicy.tensors.hashing import derive
from gradpolicy.tensors.mask import Mask, as_tensor
from gradpolicy.tensors.seeded_mask import RandomMask
from gradpolicy.tensors.sharding import is_sharded, local_shard

# Where a part of a tensor begins and ends in each dimension.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Grid:
    """A tensor cut into boxes.

    Attributes:
        shape: The tensor's shape.
        lengths: The size of a box in each dimension; the last ones may be smaller.
    """

    shape: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    @functools.cache
    def of(cls, shape: tuple[int, ...], most: int | None) -> "Grid":
        """Cuts a tensor into boxes of at most so many entries, or into one (None)."""
        left = math.prod(shape) if most is None else most
        lengths = []
        for size in reversed(shape):
            lengths.append(max(1, min(size, left)))
            left //= lengths[-1]
        return cls(tuple(shape), tuple(reversed(lengths)))

    @functools.cached_property
    def count(self) -> int:
        """How many boxes there are."""
        return math.prod(-(-size // length) for size, length in zip(self.shape, self.lengths, strict=True))

    def box(self, number: int) -> Box:
        """One of the boxes; the last dimension comes round first."""
        found = []
        for size, length in reversed([*zip(self.shape, self.lengths, strict=True)]):
            number, place = divmod(number, -(-size // length))
            found.append((place * length, min((place + 1) * length, size)))
        return tuple(reversed(found))


def size_of(box: Box) -> int:
    """How many entries a box has."""
    return math.prod(stop - start for start, stop in box)


def turn(number: int, total: int, seed: int = 0) -> int:
    """The place of a turn: `total` turns in a row visit each place once.

    Example:
        >>> sorted(turn(number, 7) for number in range(7))
        [0, 1, 2, 3, 4, 5, 6]
    """
    # About the golden section, so that few turns are spread over all places.
    stride = next(step for step in range(int(0.618 * total) + 1, 2 * total + 2) if math.gcd(step, total) == 1)
    return (derive("audit", seed) + number * stride) % total


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """The part of a tensor in a box; a dimension of size 1 stands for all of it."""
    for dim, (start, stop) in enumerate(box):
        if tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def frozen_entries(mask: Mask, parameter: Tensor, box: Box) -> Tensor:
    """Which entries of a box of this process's part of a parameter are frozen.

    Args:
        mask: The mask in force on the whole parameter.
        parameter: The parameter.
        box: Part of its local shard.

    Returns:
        A flag for each entry (bool, 1-D), on the parameter's device.
    """
    lengths = [stop - start for start, stop in box]
    device = local_shard(parameter).device
    if isinstance(mask, bool):
        return torch.full((math.prod(lengths),), not mask, device=device)
    if isinstance(mask, RandomMask) and not is_sharded(parameter) and box:
        start, stop = box[0]
        active = mask.materialize(parameter.shape, device, start=start, stop=stop)
        box = ((0, stop - start), *box[1:])
    else:
        active = as_tensor(mask, parameter.shape, device)
        active = local_mask(active.reshape((1,) * (len(box) - active.dim()) + tuple(active.shape)), parameter)
    return ~narrowed(active.to(device), box).expand(lengths).reshape(-1)


def indices_in(box: Box, chosen: Tensor, most: int) -> list[tuple[int, ...]]:
    """Where the first few chosen entries (bool, 1-D) of a box lie in the tensor."""
    first = chosen.nonzero().view(-1)[:most]
    if not box:
        return [()]
    places = torch.unravel_index(first, [stop - start for start, stop in box])
    shifted = [place + start for place, (start, _) in zip(places, box, strict=True)]
    return [tuple(index) for index in torch.stack(shifted, 1).tolist()]
