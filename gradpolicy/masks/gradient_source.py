"""Gradients summed over a window of effective steps, for sources that decide by them."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_whole
from gradpolicy.masks.base import MaskSource
from gradpolicy.tensors.sharding import full_tensor, shard_like


class GradientSource(MaskSource):
    """A mask source that decides by gradients of the steps before each change.

    It asks for the gradients of the last ``window`` effective steps (or epochs) before its masks change.
    Where a change comes too early for that, it waits until the window is full. Windows do not overlap: where
    they are longer than ``every``, each change waits, and a warning says so. A step with a gradient that is
    not finite does not count.

    Args:
        window: How many steps (or epochs) of gradients go into a decision; None: all since the last one.
        **timetable: ``every``, ``unit``, ``start``, ``stop``, ``seed``: see :class:`MaskSource`.

    Attributes:
        sums: The sums since the last decision: of each of ``statistics``, by parameter name.
        steps: The number of effective steps that are in the sums.
        decided: The period whose masks are in force; −1 before the first decision.
        decided_at: The count of the last decision.
    """

    needs_gradients = True
    repeats_masks = True
    # What is summed over the window: keys of STATISTICS.
    statistics: Sequence[str] = ("gradient",)

    def __init__(self, *, window: int | None = 1, **timetable: Any) -> None:
        super().__init__(**timetable)
        kind = type(self).__name__
        self.window = None if window is None else check_whole(f"{kind}.window", window, least=1)
        self.sums: dict[str, dict[str, Tensor]] = {}
        self.steps = 0
        self.decided, self.decided_at = -1, 0

    def prepare(self) -> None:
        """Discard gradients and decisions."""
        self.sums, self.steps = {}, 0
        self.decided, self.decided_at = -1, 0
        times = self.timetable
        if self.needs_gradients and (self.window or 0) > (times.every or math.inf):
            warnings.warn(
                f"{type(self).__name__}: window={self.window} is longer than every={times.every}; each "
                f"change waits for {self.window} {times.unit}s of gradients of its own",
                stacklevel=3,
            )

    def wants_gradients(self, step: int, epoch: int) -> bool:
        """Return True in the last ``window`` counts before a change, and while a change waits."""
        if not self.needs_gradients:
            return False
        count = self.count(step, epoch)
        if self.decided < self.period(step, epoch):
            return True
        change = self.timetable.next(count)
        return change is not None and (self.window is None or change - count <= self.window)

    def overdue(self, step: int, epoch: int) -> bool:
        """Return True if a decision is still to be made, and the gradients for it are there."""
        if self.decided >= self.period(step, epoch):
            return False
        if not self.needs_gradients:
            return True
        if self.timetable.unit == "epoch":
            return self.steps > 0 and epoch >= self.decided_at + (self.window or 0)
        return self.steps >= (self.window or 1)

    def decide(self, step: int, epoch: int) -> None:
        """Note that a decision was made: the next one goes by gradients of its own."""
        self.decided, self.decided_at = self.period(step, epoch), self.count(step, epoch)
        self.sums, self.steps = {}, 0

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of an effective step."""
        self.observe_more(gradients)
        self.steps += 1

    @torch.no_grad()
    def observe_more(self, gradients: Mapping[str, Tensor]) -> None:
        """Add further gradients of the same step."""
        for name, gradient in gradients.items():
            weight = self.parameters[name].detach()
            for statistic in self.statistics:
                sums = self.sums.setdefault(statistic, {})
                value = STATISTICS[statistic](weight, wide(gradient))
                if name in sums:
                    sums[name] += value
                else:
                    sums[name] = value.clone() if value is gradient else value
                # The next one is made when this one's memory is free.
                del value

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients gathered so far, and the last decision."""
        return {
            "sums": {
                statistic: {name: full_tensor(tensor) for name, tensor in sums.items()}
                for statistic, sums in self.sums.items()
            },
            "steps": self.steps,
            "decided": self.decided,
            "decided_at": self.decided_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.sums = {
            statistic: {name: shard_like(each, self.parameters[name]) for name, each in sums.items()}
            for statistic, sums in state["sums"].items()
        }
        self.steps = state["steps"]
        self.decided, self.decided_at = state["decided"], state["decided_at"]


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in single precision, or in double where it has that; complex where it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _real_product(first: Tensor, second: Tensor) -> Tensor:
    """Return the product; of complex numbers the sum of the products of their parts."""
    return (first * second.conj()).real if first.is_complex() else first * second


STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gradient": lambda weight, gradient: gradient,
    "product": lambda weight, gradient: _real_product(wide(weight), gradient),
    "second_moment": lambda weight, gradient: _real_product(gradient, gradient),
}
"""What can be summed over a window, of a parameter and its gradient in single precision or better."""
