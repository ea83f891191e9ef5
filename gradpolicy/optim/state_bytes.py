"""How much memory an optimizer's state takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradpolicy.tensors.sharding import local_shard


def bytes_of(state: Mapping[Any, Any]) -> int:
    """Bytes that an optimizer's state holds on this process; some of it may be the whole optimizer's."""
    total = 0
    for value in state.values():
        if isinstance(value, Tensor):
            total += local_shard(value).nbytes
        elif isinstance(value, Mapping):
            total += bytes_of(value)
    return total
