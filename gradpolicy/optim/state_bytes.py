"""How much memory an optimizer's state takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradpolicy.tensors.sharding import local_shard


def bytes_of(state: Mapping[Any, Any]) -> int:
    """Bytes that an optimizer's state holds on this process; some of it may be the whole optimizer's."""
    tensors = [local_shard(value) for value in state.values() if isinstance(value, Tensor)]
    own = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return own + sum(bytes_of(part) for part in state.values() if isinstance(part, Mapping))
