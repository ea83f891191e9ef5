"""Ascending indices as small numbers: the gap before each."""

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError

KINDS = (torch.uint8, torch.uint16)


def encode(indices: Tensor) -> Tensor:
    """Writes ascending indices as gaps of one byte, or of two where that takes less.

    The gap before index ``i_k`` is ``g = i_k − i_{k−1} − 1``, with ``i_{−1} = −1``. With ``m`` the largest
    number of the type it is written as ``g // m`` times ``m``, then ``g % m``. At a density of 1 % an index
    takes 1.1 bytes.

    Args:
        indices: Ascending, from 0 on (int64, 1-D).

    Returns:
        1-D, uint8 or uint16.

    Example:
        >>> encode(torch.tensor([0, 3, 300])).tolist()
        [0, 2, 255, 41]
    """
    before = torch.cat([indices.new_tensor([-1]), indices[:-1]])
    gaps = indices - before - 1
    sizes = {kind: _places(gaps, kind) * kind.itemsize for kind in KINDS}
    kind = min(KINDS, key=lambda each: sizes[each])
    most = torch.iinfo(kind).max
    written = torch.full((_places(gaps, kind),), most, dtype=torch.int64)
    written[(gaps // most + 1).cumsum(0) - 1] = gaps % most
    return written.to(kind)


def decode(gaps: Tensor, limit: int) -> Tensor:
    """Reads what :func:`encode` wrote.

    Args:
        gaps: As they stand in a file that anybody may have made.
        limit: All indices must be below it.

    Returns:
        Indices (int64), ascending, without repetition.

    Raises:
        PolicyError: If these are no gaps, or an index lies beyond the limit.

    Example:
        >>> decode(torch.tensor([0, 2, 255, 41], dtype=torch.uint8), limit=301).tolist()
        [0, 3, 300]
    """
    if gaps.dtype not in KINDS or gaps.dim() != 1:
        raise PolicyError(f"gaps must be 1-D, of 8 or 16 bits, got {gaps.dtype} of {gaps.dim()} dimensions")
    steps = gaps.to(torch.int64)
    ends = steps != torch.iinfo(gaps.dtype).max
    if len(ends) and not bool(ends[-1]):
        raise PolicyError("the last gap has no end")
    indices = (steps + ends).cumsum(0)[ends] - 1
    if len(indices) and int(indices[-1]) >= limit:
        raise PolicyError(f"index {int(indices[-1])} is out of range, there are {limit}")
    return indices


def _places(gaps: Tensor, kind: torch.dtype) -> int:
    return int((gaps // torch.iinfo(kind).max + 1).sum())
