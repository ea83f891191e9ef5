"""WHEN a policy holds: in which phases, from which step or epoch, how often."""

from collections.abc import Iterable
from dataclasses import dataclass

from gradpolicy.checks import check_whole
from gradpolicy.errors import PolicyError, knows_its_arguments, shown, unknown

PHASES = ("fit", "validate", "test", "predict")
UNITS = ("step", "epoch")


@dataclass(frozen=True, init=False)
class When:
    """The times at which a policy holds.

    A policy holds at count ``n`` (of effective optimizer steps, or of epochs) where
    ``start <= n < stop`` and ``(n - start) % every == 0``, in the phases named. Outside ``fit``
    only the phase counts, since no optimizer step is taken there.

    Args:
        phases: One or several of ``fit``, ``validate``, ``test``, ``predict``.
        start: First step or epoch, from 0.
        stop: The step or epoch at which the policy ends; None for never.
        every: Holds at each ``every``-th step or epoch only.
        unit: ``"step"`` (effective optimizer steps) or ``"epoch"``.

    Raises:
        PolicyError: For an unknown argument, phase or unit, or an impossible range.

    Example:
        >>> warmed_up = When(start=100, unit="step")
        >>> warmed_up.active(phase="fit", step=99), warmed_up.active(phase="fit", step=100)
        (False, True)
    """

    phases: tuple[str, ...]
    start: int
    stop: int | None
    every: int
    unit: str

    @knows_its_arguments
    def __init__(
        self,
        phases: str | Iterable[str] = ("fit",),
        start: int = 0,
        stop: int | None = None,
        every: int = 1,
        unit: str = "step",
    ) -> None:
        if not isinstance(phases, Iterable) or not phases:
            raise PolicyError(f"when.phases: must name one phase or more, got {shown(phases)}")
        names = (phases,) if isinstance(phases, str) else tuple(phases)
        for phase in names:
            if phase not in PHASES:
                raise unknown("phase", str(phase), PHASES, key="when.phases")
        if unit not in UNITS:
            raise unknown("unit", str(unit), UNITS, key="when.unit")
        check_whole("when.start", start, least=0)
        check_whole("when.every", every, least=1)
        if stop is not None and (not isinstance(stop, int) or isinstance(stop, bool) or stop <= start):
            raise PolicyError(f"when.stop: must be a whole number above start ({start}), got {shown(stop)}")
        object.__setattr__(self, "phases", names)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "every", every)
        object.__setattr__(self, "unit", unit)

    def active(self, *, phase: str = "fit", step: int = 0, epoch: int = 0) -> bool:
        """Whether a policy holds now.

        Args:
            phase: The phase that runs.
            step: Effective optimizer steps taken so far.
            epoch: Epochs completed so far.
        """
        if phase not in self.phases:
            return False
        if phase != "fit":
            return True
        count = step if self.unit == "step" else epoch
        return (
            self.start <= count
            and (self.stop is None or count < self.stop)
            and (count - self.start) % self.every == 0
        )
