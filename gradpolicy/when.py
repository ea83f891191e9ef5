"""Times: when a policy is active, and when masks may change."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from gradpolicy.checks import check_choice, check_integer
from gradpolicy.errors import PolicyError, refuse_unknown_arguments, shown

PHASES = ("fit", "validate", "test", "predict")
UNITS = ("step", "epoch")


@dataclass(frozen=True)  # as are its subclasses, so that jsonargparse writes them as dicts
class Window:
    """The counts ``start <= n < stop`` of effective optimizer steps, or of epochs.

    Attributes:
        start: First step or epoch, from 0.
        stop: The step or epoch at which the window ends; None for never.
        unit: ``"step"`` or ``"epoch"``.
    """

    if TYPE_CHECKING:
        start: int
        stop: int | None
        unit: str

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Check the names of the arguments."""
        refuse_unknown_arguments(cls, named)
        return super().__new__(cls)

    def check(self, key: str) -> None:
        """Check the values; an error names the argument of ``key``.

        Raises:
            PolicyError: For an unknown unit or an impossible range.
        """
        check_choice(f"{key}.unit", self.unit, UNITS, kind="unit")
        check_integer(f"{key}.start", self.start, least=0)
        stop = self.stop
        if stop is not None and (isinstance(stop, bool) or not isinstance(stop, int) or stop <= self.start):
            limit = f"an integer above start ({self.start})"
            raise PolicyError(f"{key}.stop: expected {limit}, got {shown(stop)}")

    def count(self, step: int, epoch: int) -> int:
        """Return the count in the window's unit."""
        return step if self.unit == "step" else epoch

    def contains(self, step: int, epoch: int) -> bool:
        """Return True if the current count is in the window."""
        count = self.count(step, epoch)
        return self.start <= count and (self.stop is None or count < self.stop)

    def overlaps(self, other: "Window") -> bool:
        """Return True if a count is in both windows; windows of different units are assumed to overlap."""
        if self.unit != other.unit:
            return True
        ends = [each.stop for each in (self, other) if each.stop is not None]
        return max(self.start, other.start) < min(ends, default=math.inf)


@dataclass(frozen=True)
class Timetable(Window):
    """The counts at which masks may change: ``start``, ``start + every``, … below ``stop``.

    Args:
        start: The first count.
        stop: The end, which is excluded; None for no end.
        unit: ``"step"`` or ``"epoch"``.
        every: The number of steps or epochs between two counts; None: only the first one.
    """

    start: int = 0
    stop: int | None = None
    unit: str = "step"
    every: int | None = None

    def check(self, key: str) -> None:
        """Check the values; an error names the argument of ``key``.

        Raises:
            PolicyError: For an unknown unit or an impossible range.
        """
        super().check(key)
        if self.every is not None:
            check_integer(f"{key}.every", self.every, least=1)

    def period(self, step: int, epoch: int) -> int:
        """Return the number of counts since the first one; −1 before it."""
        count = self.count(step, epoch)
        if count < self.start:
            return -1
        if self.stop is not None:
            count = min(count, self.stop - 1)
        return 0 if self.every is None else (count - self.start) // self.every

    def begins(self, period: int) -> int:
        """Return the count at which a period starts."""
        return self.start + max(period, 0) * (self.every or 0)

    def next(self, count: int) -> int | None:
        """Return the first of the counts after this one; None if there is none."""
        if count < self.start:
            return self.start
        if self.every is None:
            return None
        change = self.start + ((count - self.start) // self.every + 1) * self.every
        return change if self.stop is None or change < self.stop else None


@dataclass(frozen=True)
class When(Window):
    """The times at which a policy is active.

    A policy is active at count ``n`` (of effective optimizer steps, or of epochs) if
    ``start <= n < stop`` and ``(n - start) % every == 0``, in the given phases. Outside ``fit``
    only the phase matters, since there are no optimizer steps.

    Args:
        phases: One or several of ``fit``, ``validate``, ``test``, ``predict``.
        start: First step or epoch, from 0.
        stop: The step or epoch at which the policy ends; None for never.
        every: Active only at every n-th step or epoch from `start` on.
        unit: ``"step"`` (effective optimizer steps) or ``"epoch"``.

    Raises:
        PolicyError: For an unknown argument, phase or unit, or an impossible range.

    Example:
        >>> warmed_up = When(start=100, unit="step")
        >>> warmed_up.active(phase="fit", step=99), warmed_up.active(phase="fit", step=100)
        (False, True)
    """

    phases: str | Sequence[str] = ("fit",)
    start: int = 0
    stop: int | None = None
    every: int = 1
    unit: str = "step"

    def __post_init__(self) -> None:
        if not isinstance(self.phases, Iterable) or not self.phases:
            raise PolicyError(f"when.phases: must name one phase or more, got {shown(self.phases)}")
        phases = (self.phases,) if isinstance(self.phases, str) else tuple(self.phases)
        for phase in phases:
            check_choice("when.phases", phase, PHASES, kind="phase")
        object.__setattr__(self, "phases", phases)
        self.check("when")
        check_integer("when.every", self.every, least=1)

    @property
    def changes(self) -> bool:
        """True if the policy is active at some counts only."""
        return (self.start, self.stop, self.every) != (0, None, 1)

    def active(self, *, phase: str = "fit", step: int = 0, epoch: int = 0) -> bool:
        """Return True if the policy is active.

        Args:
            phase: The phase that runs.
            step: Effective optimizer steps taken so far.
            epoch: Epochs completed so far.
        """
        if phase not in self.phases:
            return False
        if phase != "fit":
            return True
        return self.contains(step, epoch) and (self.count(step, epoch) - self.start) % self.every == 0
