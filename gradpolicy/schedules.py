"""Schedules: numbers that are functions of the step (or epoch) count.

A schedule is any callable ``count -> float``. These can be pickled, compared, and used in YAML as
``_target_: gradpolicy.schedules.Ganin``. Use a schedule wherever a rule takes a number, or a mask source a
density. The ramps start at count ``begin``, take ``steps`` counts, and are constant before and after. ``p``
rises from 0 to 1 over the steps.

Example:
    >>> import gradpolicy as gp
    >>> warm_up = gp.schedules.Linear(0.0, 1.0, steps=100)
    >>> warm_up(0), warm_up(25), warm_up(1_000)
    (0.0, 0.25, 1.0)
    >>> policy = gp.Reverse(factor=gp.schedules.Ganin(steps=10_000), modules="domain_head")
"""

import math
from abc import ABC, abstractmethod
from typing import Any

from gradpolicy.checks import check_integer, check_number, plain_number
from gradpolicy.errors import KnowsItsArguments, PolicyError, shown

__all__ = ["Constant", "Cosine", "Cubic", "Exponential", "Ganin", "Linear"]


class Schedule(KnowsItsArguments, ABC):
    """Base class of schedules, which are equal if their class and settings are.

    It is not a dataclass, since Hydra would treat one within ``parameters:`` as a structured config.
    """

    @abstractmethod
    def __call__(self, count: int) -> float:
        """Return the value at a count of steps or epochs."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items())
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def _number(self, key: str, value: object) -> float:
        return check_number(f"{type(self).__name__}.{key}", value, least=-math.inf)


class Constant(Schedule):
    """The same number at every count.

    Args:
        value: The number.
    """

    def __init__(self, value: float) -> None:
        self.value = self._number("value", value)

    def __call__(self, count: int) -> float:
        """Return the number."""
        return self.value


class Ramp(Schedule):
    """Base class of ramps from one number to another.

    Args:
        start: The value until ``begin``.
        stop: The value from ``begin + steps`` on.
        steps: The length of the ramp in counts.
        begin: The count at which it starts.

    Raises:
        PolicyError: If a value is not finite, or there is not at least one step.
    """

    def __init__(self, start: float, stop: float, steps: int, begin: int = 0) -> None:
        self.start = self._number("start", start)
        self.stop = self._number("stop", stop)
        self.steps = check_integer(f"{type(self).__name__}.steps", steps, least=1)
        self.begin = check_integer(f"{type(self).__name__}.begin", begin, least=0)

    def __call__(self, count: int) -> float:
        """Return the value at a count of steps or epochs."""
        return self.value_at(progress(count - self.begin, self.steps))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.start}, {self.stop}, steps={self.steps}, begin={self.begin})"

    @abstractmethod
    def value_at(self, passed: float) -> float:
        """Return the value at a share of the ramp, from 0 to 1."""


class Linear(Ramp):
    """A straight line: ``stop + (start − stop) · (1 − p)``."""

    def value_at(self, passed: float) -> float:
        """Return the value at a share of the ramp, from 0 to 1."""
        return self.stop + (self.start - self.stop) * (1 - passed)


class Cosine(Ramp):
    """Half a cosine wave, slow at both ends: ``stop + (start − stop) · (1 + cos πp) / 2``.

    Source: Loshchilov, Hutter 2017 (SGDR), arXiv:1608.03983.
    """

    def value_at(self, passed: float) -> float:
        """Return the value at a share of the ramp, from 0 to 1."""
        return self.stop + (self.start - self.stop) * (1 + math.cos(math.pi * passed)) / 2


class Cubic(Ramp):
    """Fast at first, slow at the end: ``stop + (start − stop) · (1 − p)³``.

    Source: Zhu, Gupta 2017, arXiv:1710.01878.
    """

    def value_at(self, passed: float) -> float:
        """Return the value at a share of the ramp, from 0 to 1."""
        return self.stop + (self.start - self.stop) * (1 - passed) ** 3


class Exponential(Ramp):
    """A constant ratio from count to count: ``start · (stop / start)ᵖ``.

    Raises:
        PolicyError: If the ratio does not exist: one end is 0, or the signs differ.
    """

    def __init__(self, start: float, stop: float, steps: int, begin: int = 0) -> None:
        super().__init__(start, stop, steps, begin)
        if not self.start * self.stop > 0:
            raise PolicyError(
                f"Exponential: start and stop must be of one sign, not 0; got {shown(start)}, {shown(stop)}"
            )

    def value_at(self, passed: float) -> float:
        """Return the value at a share of the ramp, from 0 to 1."""
        return self.start * (self.stop / self.start) ** passed


class Ganin(Schedule):
    """The ramp of domain-adversarial training: ``2 / (1 + exp(−gamma · p)) − 1``, from 0 towards 1.

    Args:
        gamma: The steepness.
        steps: The length of the ramp in counts, usually the length of the training.
        begin: The count at which it starts.

    Source: Ganin, Lempitsky 2015, arXiv:1409.7495 (λₚ of its experiments).
    """

    def __init__(self, gamma: float = 10.0, steps: int = 10_000, begin: int = 0) -> None:
        self.gamma = self._number("gamma", gamma)
        self.steps = check_integer(f"{type(self).__name__}.steps", steps, least=1)
        self.begin = check_integer(f"{type(self).__name__}.begin", begin, least=0)

    def __call__(self, count: int) -> float:
        """Return the value at a count of steps or epochs."""
        # tanh(z / 2) is the same function, and does not overflow.
        return math.tanh(self.gamma * progress(count - self.begin, self.steps) / 2)


def progress(count: int, steps: int) -> float:
    """Return the completed share of a ramp: 0 at count 0, 1 from ``steps`` on."""
    return min(max(count / steps, 0.0), 1.0)


def value_at(value: Any, count: int) -> Any:
    """Return a value, or what a function of the count returns; one number of torch or NumPy as Python's."""
    return plain_number(value(count) if callable(value) else value)
