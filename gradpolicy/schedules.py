"""Ready schedules: a rule's number as a function of the step (or epoch) count.

A schedule is any callable ``count -> float``. These can be pickled, compared and named in YAML as
``_target_: gradpolicy.schedules.Ganin``; give one wherever a rule takes a number.

Example:
    >>> import gradpolicy as gp
    >>> warm_up = gp.schedules.Linear(0.0, 1.0, steps=100)
    >>> warm_up(0), warm_up(25), warm_up(1_000)
    (0.0, 0.25, 1.0)
    >>> policy = gp.Reverse(factor=gp.schedules.Ganin(steps=10_000), modules="domain_head")
"""

import math
from dataclasses import dataclass

from gradpolicy.errors import PolicyError

__all__ = ["Constant", "Cosine", "Exponential", "Ganin", "Linear"]


@dataclass(frozen=True)
class Constant:
    """The same number at every count.

    Args:
        value: The number.
    """

    value: float

    def __post_init__(self) -> None:
        _check_numbers(self, "value")

    def __call__(self, count: int) -> float:
        """The value at a count."""
        return float(self.value)


@dataclass(frozen=True)
class Linear:
    """A straight line: ``start + (stop − start) · p`` with ``p = min(count / steps, 1)``.

    Args:
        start: The value at count 0.
        stop: The value from count ``steps`` on.
        steps: The length of the ramp.
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        _check_numbers(self, "start", "stop")
        _check_steps(self)

    def __call__(self, count: int) -> float:
        """The value at a count."""
        return self.start + (self.stop - self.start) * progress(count, self.steps)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine wave: ``stop + (start − stop) · (1 + cos(π p)) / 2`` with ``p = min(count / steps, 1)``.

    Args:
        start: The value at count 0.
        stop: The value from count ``steps`` on.
        steps: The length of the ramp.

    Source: the half-wave of Loshchilov, Hutter 2017 (SGDR), arXiv:1608.03983.
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        _check_numbers(self, "start", "stop")
        _check_steps(self)

    def __call__(self, count: int) -> float:
        """The value at a count."""
        wave = (1 + math.cos(math.pi * progress(count, self.steps))) / 2
        return self.stop + (self.start - self.stop) * wave


@dataclass(frozen=True)
class Exponential:
    """A constant ratio from step to step: ``start · (stop / start)ᵖ`` with ``p = min(count / steps, 1)``.

    Args:
        start: The value at count 0; not 0.
        stop: The value from count ``steps`` on; not 0, and of the same sign.
        steps: The length of the ramp.

    Raises:
        PolicyError: If a ratio of the two does not exist.
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        _check_numbers(self, "start", "stop")
        _check_steps(self)
        if not self.start * self.stop > 0:
            raise PolicyError(
                f"Exponential: start and stop must be of one sign, not 0; got {self.start!r}, {self.stop!r}"
            )

    def __call__(self, count: int) -> float:
        """The value at a count."""
        return self.start * (self.stop / self.start) ** progress(count, self.steps)


@dataclass(frozen=True)
class Ganin:
    """The ramp of domain-adversarial training: ``2 / (1 + exp(−gamma · p)) − 1``, from 0 towards 1.

    Args:
        gamma: Steepness of the rise.
        steps: The count at which ``p = 1``, as a rule the length of the training.

    Source: Ganin, Lempitsky 2015, arXiv:1409.7495 (λₚ of its experiments).
    """

    gamma: float = 10.0
    steps: int = 10_000

    def __post_init__(self) -> None:
        _check_numbers(self, "gamma")
        _check_steps(self)

    def __call__(self, count: int) -> float:
        """The value at a count."""
        # tanh(z / 2) is the same function, and does not overflow.
        return math.tanh(self.gamma * progress(count, self.steps) / 2)


def progress(count: int, steps: int) -> float:
    """How much of a ramp is done: 0 at count 0, 1 from ``steps`` on."""
    return min(max(count / steps, 0.0), 1.0)


def _check_numbers(schedule: object, *keys: str) -> None:
    for key in keys:
        value = getattr(schedule, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PolicyError(f"{type(schedule).__name__}.{key}: must be a finite number, got {value!r}")


def _check_steps(schedule: "Linear | Cosine | Exponential | Ganin") -> None:
    steps = schedule.steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise PolicyError(
            f"{type(schedule).__name__}.steps: must be a whole number of at least 1, got {steps!r}"
        )
