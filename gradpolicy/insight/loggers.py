"""Lightning's loggers for dashboards, without charts of what never changes."""

from collections.abc import Mapping
from functools import cached_property

from lightning.pytorch import loggers
from lightning.pytorch.loggers import Logger

PREFIXES = ("policy/", "test/policy/")


class VaryingOnly(Logger):
    """Writes a number of a policy only once it has changed, from its first step on.

    A policy that always holds, with operations that are met in each step, would fill a dashboard with flat
    lines. A logger of files keeps them.
    """

    # Without an __init__ of its own, so that a logger's arguments are its base class's.
    @cached_property
    def _constant(self) -> dict[str, tuple[float, int | None, int | None]]:
        """The value of each number that never changed, with its first step and its newest."""
        return {}

    @cached_property
    def _varying(self) -> set[str]:
        return set()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes all but what has not changed yet."""
        written = {}
        for name, value in metrics.items():
            if not name.startswith(PREFIXES) or name in self._varying:
                written[name] = value
                continue
            if name not in self._constant:
                self.hold_back(name, value)
            former, first, newest = self._constant.get(name, (value, step, step))
            if value == former:
                self._constant[name] = (value, first, step)
                continue
            for earlier in dict.fromkeys((first, newest)):
                super().log_metrics({name: former}, earlier)  # type: ignore[safe-super]
            self._varying.add(name)
            written[name] = value
        if written:
            super().log_metrics(written, step)  # type: ignore[safe-super]

    def hold_back(self, name: str, value: float) -> None:
        """Called once for a number that is not written."""


class MLFlowLogger(VaryingOnly, loggers.MLFlowLogger):
    """Lightning's ``MLFlowLogger``, without charts of what never changes."""


class TensorBoardLogger(VaryingOnly, loggers.TensorBoardLogger):
    """Lightning's ``TensorBoardLogger``, without charts of what never changes."""


class WandbLogger(VaryingOnly, loggers.WandbLogger):
    """Lightning's ``WandbLogger``: what never changes is in a run's summary and has no chart."""

    def hold_back(self, name: str, value: float) -> None:
        """Puts the number into the summary, by which runs can be sorted and filtered."""
        self.experiment.summary[name] = value
