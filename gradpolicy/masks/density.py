"""Density over time: constant, linear, cosine, cubic.

A schedule is a function of a count of effective steps (or epochs, as the mask source's ``unit`` says).
With ``τ`` = the share of ``steps`` that has passed since ``begin``, cut to [0, 1]:

=========  ====================================================
Constant   ``value``
Linear     ``stop + (start − stop) · (1 − τ)``
Cosine     ``stop + (start − stop) · ½ (1 + cos πτ)``
Cubic      ``stop + (start − stop) · (1 − τ)³`` (Zhu, Gupta 2017, arXiv:1710.01878)
=========  ====================================================
"""

import inspect
import math
from collections.abc import Callable

from gradpolicy.checks import check_share, check_whole
from gradpolicy.errors import PolicyError, knows_its_arguments

Schedule = Callable[[int], float]


class Constant:
    """The same value at all times.

    Args:
        value: A share between 0 and 1.
        key: What to call it in the message of an error.
    """

    @knows_its_arguments
    def __init__(self, value: float, *, key: str = "Constant.value") -> None:
        self.value = check_share(key, value)

    def __call__(self, count: int) -> float:
        """The value."""
        return self.value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value})"


class Ramp:
    """A value that goes from one share to another; the subclasses say along which curve.

    Args:
        start: The share until ``begin``.
        stop: The share from ``begin + steps`` on.
        steps: How many steps (or epochs) the way takes.
        begin: The count at which it starts.

    Raises:
        PolicyError: For a share outside [0, 1] or fewer than one step.
    """

    @knows_its_arguments
    def __init__(self, start: float, stop: float, steps: int, begin: int = 0) -> None:
        kind = type(self).__name__
        self.start = check_share(f"{kind}.start", start)
        self.stop = check_share(f"{kind}.stop", stop)
        self.steps = check_whole(f"{kind}.steps", steps, least=1)
        self.begin = check_whole(f"{kind}.begin", begin, least=0)

    def remaining(self, passed: float) -> float:
        """Which part of the way is left where a share ``passed`` of the time is over."""
        raise TypeError(f"{type(self).__name__} has no curve: use Linear, Cosine or Cubic")

    def __call__(self, count: int) -> float:
        """The share at a count of steps or epochs."""
        passed = min(max((count - self.begin) / self.steps, 0.0), 1.0)
        return self.stop + (self.start - self.stop) * self.remaining(passed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.start}, {self.stop}, steps={self.steps}, begin={self.begin})"


class Linear(Ramp):
    """In a straight line: ``1 − τ`` of the way is left.

    Example:
        >>> density = Linear(start=1.0, stop=0.2, steps=4)
        >>> [round(density(step), 2) for step in range(6)]
        [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    """

    def remaining(self, passed: float) -> float:
        """``1 − τ``."""
        return 1.0 - passed


class Cosine(Ramp):
    """Slow at both ends: ``½ (1 + cos πτ)`` of the way is left."""

    def remaining(self, passed: float) -> float:
        """``½ (1 + cos πτ)``."""
        return 0.5 * (1.0 + math.cos(math.pi * passed))


class Cubic(Ramp):
    """Fast at first: ``(1 − τ)³`` of the way is left (Zhu, Gupta 2017, arXiv:1710.01878)."""

    def remaining(self, passed: float) -> float:
        """``(1 − τ)³``."""
        return (1.0 - passed) ** 3


def as_schedule(key: str, value: float | Schedule) -> Schedule:
    """Takes a schedule as it is, and a number as a constant one.

    Args:
        key: What the value is called in the message of an error.
        value: A function of the count, or a share.

    Raises:
        PolicyError: If it is neither a share between 0 and 1 nor a function of the count.
    """
    if callable(value):
        try:
            inspect.signature(value).bind(0)
        except TypeError as error:
            raise PolicyError(f"{key}: must take the count alone: {error}") from error
        except ValueError:
            pass  # written in C, without a signature to look at
        return value
    return Constant(value, key=key)


def density_at(schedule: Schedule, count: int) -> float:
    """The schedule's density at a count.

    Raises:
        PolicyError: If a schedule of the user's gives a value outside [0, 1].
    """
    return check_share(f"density at {count}", schedule(count))
