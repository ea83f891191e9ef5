"""The base class of sources that choose masks by gradients summed over steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_integer
from gradpolicy.errors import warn_user
from gradpolicy.masks.base import MaskSource


class GradientSource(MaskSource):
    """A mask source that chooses masks by the gradients of the steps before each change.

    It sums the gradients of the last ``window`` effective steps (or epochs) before a change. A change is
    delayed until its window is full. Windows do not overlap: if they are longer than ``every``, all changes
    are delayed, with a warning. Steps with a gradient that is not finite do not count.

    Args:
        window: The number of steps (or epochs) whose gradients are summed.
        **timetable: ``every``, ``unit``, ``start``, ``stop``, ``seed``: see :class:`MaskSource`.

    Attributes:
        sums: The sums since the last change, by statistic and parameter name.
        steps: The number of effective steps in the sums.
        decided: The period of the current masks; −1 before the first change.
        decided_at: The count of the last change.
    """

    repeats_masks = True
    remembered: Mapping[str, Any] = {"sums": {}, "steps": 0, "decided": 0, "decided_at": 0}
    # The statistics that are summed: keys of STATISTICS.
    statistics: Sequence[str] = ("gradient",)
    # False if sums are only needed while they are observed, so that gradients need not be copied.
    keeps_gradients = True

    def __init__(self, *, window: int = 1, **timetable: Any) -> None:
        super().__init__(**timetable)
        self.window = check_integer(f"{type(self).__name__}.window", window, least=1)
        self._reset()

    def _reset(self) -> None:
        self.sums: dict[str, dict[str, Tensor]] = {}
        self.steps = 0
        self.decided, self.decided_at = -1, 0

    def prepare(self) -> None:
        """Reset the sums."""
        self._reset()
        times = self.timetable
        if self.needs_gradients and self.window > (times.every or math.inf):
            warn_user(
                f"{type(self).__name__}: window={self.window} is longer than every={times.every}; each "
                f"change waits for {self.window} {times.unit}s of gradients of its own"
            )

    def gradient_names(self, step: int, epoch: int) -> set[str]:
        """Return names in the last ``window`` counts before a change, and while a change is delayed."""
        count = self.timetable.count(step, epoch)
        change = self.timetable.next(count)
        before_change = change is not None and change - count <= self.window
        wanted = before_change or self.decided < self.period(step, epoch)
        return super().gradient_names(step, epoch) if wanted else set()

    def overdue(self, step: int, epoch: int) -> bool:
        """Return True if a change is due and its window is full."""
        if self.decided >= self.period(step, epoch):
            return False
        if not self.needs_gradients:
            return True
        if self.timetable.unit == "epoch":
            return self.steps > 0 and epoch >= self.decided_at + self.window
        return self.steps >= self.window

    def decide(self, step: int, epoch: int) -> None:
        """Record a change, and reset the sums."""
        self.decided, self.decided_at = self.period(step, epoch), self.timetable.count(step, epoch)
        self.sums, self.steps = {}, 0

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of an effective step."""
        self.observe_more(gradients)
        self.steps += 1

    @torch.no_grad()
    def observe_more(self, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients of another optimizer in the same step."""
        for name, gradient in gradients.items():
            weight = self.parameters[name].detach()
            for statistic in self.statistics:
                sums = self.sums.setdefault(statistic, {})
                value = STATISTICS[statistic](weight, wide(gradient))
                if name in sums:
                    sums[name] += value
                else:
                    sums[name] = value.clone() if value is gradient and self.keeps_gradients else value
                # Free the memory before the next value is computed.
                del value


def wide(tensor: Tensor) -> Tensor:
    """Convert a tensor to at least single precision. Double and complex tensors remain so."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _real_product(first: Tensor, second: Tensor) -> Tensor:
    """Return the product, for complex numbers the sum of the products of real and imaginary parts."""
    return (first * second.conj()).real if first.is_complex() else first * second


STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gradient": lambda weight, gradient: gradient,
    "product": lambda weight, gradient: _real_product(wide(weight), gradient),
    "second_moment": lambda weight, gradient: _real_product(gradient, gradient),
}
"""Statistics of a parameter and its gradient, in at least single precision, that can be summed."""
