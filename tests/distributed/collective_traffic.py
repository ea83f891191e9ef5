"""The memory and traffic of many processes: by formula, and counted at the calls of collectives."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

STRATEGIES = ("ddp", "fsdp2")
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST = "all_reduce", "all_gather", "reduce_scatter", "broadcast"
# By operator: which collective it is, and the argument that is as large as the whole payload.
_COLLECTIVES = {
    "allreduce_": (ALL_REDUCE, 0),
    "broadcast_": (BROADCAST, 0),
    "_allgather_base_": (ALL_GATHER, 0),
    "_reduce_scatter_base_": (REDUCE_SCATTER, 1),
    "allgather_into_tensor_coalesced_": (ALL_GATHER, 0),
    "reduce_scatter_tensor_coalesced_": (REDUCE_SCATTER, 1),
}


@dataclass(frozen=True)
class Cost:
    """Bytes of one rank.

    Attributes:
        weights: Memory for weights, outside of the forward and backward pass.
        gradients: Memory for gradients after the backward pass.
        moments: Memory for the moments of Adam.
        payload: Bytes given to collectives in a step, by collective: the size of the whole, unpacked tensor.
    """

    weights: float
    gradients: float
    moments: float
    payload: Mapping[str, float] = field(default_factory=dict)

    @property
    def memory(self) -> float:
        """Weights, gradients and moments."""
        return self.weights + self.gradients + self.moments

    def wire(self, ranks: int) -> float:
        """Bytes that this rank sends in a step, with the ring algorithms."""
        return sum(ring(kind, size, ranks) for kind, size in self.payload.items())


def expected(
    strategy: str, entries: float, ranks: int, *, active: float = 1.0, drops: bool = False, size: int = 4
) -> Cost:
    """What a rank holds and sends in a step of Adam, without masks, activations and gathered blocks.

    Args:
        strategy: ``"ddp"`` or ``"fsdp2"``.
        entries: Number of entries of the model, P.
        ranks: Number of processes, N.
        active: Share of entries that train.
        drops: Whether frozen entries hold no moments (``frozen_state="drop"``).
        size: Bytes of an entry.

    Example:
        >>> cost = expected("fsdp2", 70e9, 64)
        >>> round(cost.memory / 1e9, 1), round(cost.wire(64) / 1e9)
        (17.5, 827)
    """
    whole = entries * size
    moments = 2 * whole * (active if drops else 1.0)
    if strategy == "fsdp2":
        payload = {ALL_GATHER: 2 * whole, REDUCE_SCATTER: whole}
        return Cost(whole / ranks, whole / ranks, moments / ranks, payload)
    return Cost(whole, whole, moments, {ALL_REDUCE: whole})


def ring(collective: str, payload: float, ranks: int) -> float:
    """Bytes that a rank sends for a collective of a payload.

    An all-gather or a reduce-scatter sends (N − 1)/N of it, an all-reduce is one of each, a broadcast passes
    all of it on. Source: Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002.

    Example:
        >>> ring("all_reduce", 8.0, 4)
        12.0
    """
    if collective == BROADCAST:
        return payload
    passes = 2 if collective == ALL_REDUCE else 1
    return passes * (ranks - 1) / ranks * payload


class CountedTraffic(TorchDispatchMode):
    """Counts the bytes that this process gives to collectives while the block lasts.

    It sees what goes through ``torch.distributed`` in this thread: the reducer of DistributedDataParallel,
    FSDP2 and DTensor, on the CPU in the backward pass too.

    Attributes:
        payload: Bytes by collective, as in :class:`Cost`.
        calls: Number of calls by collective.

    Example:
        ::

            with CountedTraffic() as traffic:
                model(batch).sum().backward()
            print(traffic.payload["all_reduce"])
    """

    def __init__(self) -> None:
        super().__init__()
        self.payload: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Counts an operator if it is a collective, and calls it."""
        if operator.namespace == "c10d":
            kind, place = _COLLECTIVES.get(operator._opname, (operator._opname, 0))
            self.payload[kind] += sum(t.numel() * t.element_size() for t in _tensors(arguments[place]))
            self.calls[kind] += 1
        return operator(*arguments, **(named or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
