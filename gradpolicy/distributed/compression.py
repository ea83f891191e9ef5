"""A communication hook for DistributedDataParallel that sends active entries only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradpolicy.errors import PolicyError, unknown
from gradpolicy.optim.layout import order_in_memory
from gradpolicy.tensors.mask import Mask, as_tensor, same_mask

WIRE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Traffic:
    """Counts the bytes that one rank sends by all-reduce.

    Attributes:
        bytes_sent: Bytes of packed gradients.
        bytes_full: Bytes of the same gradients, unpacked and in their own dtype.
        reductions: Number of all-reduces.
    """

    bytes_sent: int = 0
    bytes_full: int = 0
    reductions: int = 0

    def add(self, packed: Tensor, bytes_full: int) -> None:
        """Count one all-reduce."""
        self.bytes_sent += packed.nbytes
        self.bytes_full += bytes_full
        self.reductions += 1

    @property
    def share(self) -> float:
        """The share of the bytes that were sent."""
        return self.bytes_sent / max(self.bytes_full, 1)


class ActiveEntries:
    """Averages gradients over the ranks, sending active entries only; frozen entries become zero.

    Every rank must have the same masks; :func:`~gradpolicy.distributed.agreement.check_agreement` checks
    this. For each bucket the hook computes ``packed = buffer[active] / ranks``, casts it, sums it over the
    ranks and writes it back. The positions of active entries are stored until the masks change, in 8 bytes
    per entry.

    Args:
        dtype: The dtype in which gradients are sent: ``"float16"``, ``"bfloat16"``, or None for their own.
        group: The process group; None for all ranks.

    Attributes:
        traffic: Counts what was sent.

    Raises:
        PolicyError: For another dtype.

    Example:
        >>> communication = ActiveEntries(dtype="bfloat16")
        >>> communication.use_masks({})  # masks by parameter; a parameter that is not named is sent whole

        Then ``communication.register(model)`` on the model that DistributedDataParallel has wrapped.
    """

    def __init__(self, dtype: str | None = None, *, group: Any = None) -> None:
        if dtype is not None and dtype not in WIRE_DTYPES:
            raise unknown("dtype", str(dtype), WIRE_DTYPES, key="ActiveEntries.dtype")
        self.dtype = None if dtype is None else WIRE_DTYPES[dtype]
        self.group = group
        self.traffic = Traffic()
        self._masks: dict[int, Mask] = {}
        self._positions: dict[tuple[int, ...], Tensor | None] = {}

    def register(self, model: DistributedDataParallel) -> None:
        """Register the hook on a DistributedDataParallel module. Call it once.

        Raises:
            PolicyError: If it is another module.
        """
        if not isinstance(model, DistributedDataParallel):
            raise PolicyError(
                f"ActiveEntries: needs DistributedDataParallel, got {type(model).__name__}; "
                "under other strategies leave it out"
            )
        model.register_comm_hook(self, send_active)

    def use_masks(self, masks: Mapping[Tensor, Mask]) -> None:
        """Set the masks for the next backward pass.

        Args:
            masks: The masks by parameter: True or False, a bool mask that broadcasts to it, or a seeded mask.
                A parameter that is not in it is sent as a whole.
        """
        fresh: dict[int, Mask] = {
            id(parameter): mask for parameter, mask in masks.items() if mask is not True
        }
        same = fresh.keys() == self._masks.keys() and all(
            same_mask(fresh[key], self._masks[key]) for key in fresh
        )
        if not same:
            self._masks = fresh
            self._positions.clear()

    def positions(self, parameters: list[Tensor]) -> Tensor | None:
        """Return the active entries of a bucket that holds these parameters one after another.

        Returns:
            Their positions, int64; None if all are sent.
        """
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._positions:
            self._positions[key] = self._find_positions(parameters)
        return self._positions[key]

    def _find_positions(self, parameters: list[Tensor]) -> Tensor | None:
        if not any(id(parameter) in self._masks for parameter in parameters):
            return None
        flags = torch.cat([self._flags(parameter) for parameter in parameters])
        positions = flags.nonzero().view(-1)
        return None if positions.numel() == flags.numel() else positions

    def _flags(self, parameter: Tensor) -> Tensor:
        """Return a parameter's mask with a flag per entry, in the order of its gradient in a bucket."""
        mask = self._masks.get(id(parameter))
        if mask is None:
            return torch.ones(parameter.numel(), dtype=torch.bool, device=parameter.device)
        whole = as_tensor(mask, parameter.shape, parameter.device).broadcast_to(parameter.shape)
        return whole.permute(order_in_memory(parameter)).reshape(-1)


def send_active(state: ActiveEntries, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket's active entries over the ranks: the communication hook.

    Args:
        state: The hook, which has the masks and counts bytes.
        bucket: Gradients of several parameters, one after another.

    Returns:
        A future of the bucket's averaged buffer, with zeros for frozen entries.
    """
    buffer = bucket.buffer()
    positions = state.positions(bucket.parameters())
    ranks = dist.get_world_size(state.group)
    packed = (buffer if positions is None else buffer[positions]).div(ranks)
    packed = packed if state.dtype is None else packed.to(state.dtype)
    if packed.numel() == 0:
        state.traffic.bytes_full += buffer.nbytes
        return _finished(buffer.zero_())
    state.traffic.add(packed, buffer.nbytes)

    def unpack(future: Future[list[Tensor]]) -> Tensor:
        summed = future.value()[0].to(buffer.dtype)
        return buffer.copy_(summed) if positions is None else buffer.zero_().index_copy_(0, positions, summed)

    work = dist.all_reduce(packed, group=state.group, async_op=True)
    return work.get_future().then(unpack)


def _finished(value: Tensor) -> Future[Tensor]:
    devices: list[int | str | torch.device] = [value.device] if value.is_cuda else []
    future: Future[Tensor] = Future(devices=devices)
    future.set_result(value)
    return future
