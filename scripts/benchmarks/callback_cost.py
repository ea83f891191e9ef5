"""What a callback costs a training step: the time spent in it, against the rest of the same steps."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.measure import Row, time_row

STEPS, WARMUP, WINDOW = 1020, 20, 100
"""Steps of a run, those that do not count, and those that are taken together: not each writes to a file."""
HOOKS = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")
OBSERVED = ("before_masks", "after_masks", "take_gradients", "measure")


class Clock(Callback):
    """Says how long each step took and how much of it was spent in a callback. It must come last.

    Args:
        callback: The callback.
        observer: Gives what the callback has a freezer call, once training has started; None if nothing.
    """

    def __init__(self, callback: Callback, observer: Callable[[], object]) -> None:
        self.steps: list[tuple[float, float]] = []
        self._spent = self._began = 0.0
        self._observer = observer
        self._time(callback, HOOKS)

    def _time(self, called: object, methods: Iterable[str]) -> None:
        for method in methods:
            setattr(called, method, self._timed(getattr(called, method)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self._spent += time.perf_counter() - began

        return timed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Times what the freezer calls, too."""
        observer = self._observer()
        if observer is not None:
            self._time(observer, [method for method in OBSERVED if hasattr(observer, method)])

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Ends a step where the next begins."""
        now = time.perf_counter()
        self.steps.append((now - self._began, self._spent))
        self._began, self._spent = now, 0.0

    def row(self, what: str, target: float | None = None) -> Row:
        """The row of a table: steps with the callback, against what is left of them without.

        Args:
            what: What was measured, in words.
            target: The most that a step with the callback may take, against the same without.
        """
        steps = self.steps[WARMUP:]
        windows = [steps[first : first + WINDOW] for first in range(0, len(steps), WINDOW)]
        taken = [sum(step for step, _ in window) / len(window) for window in windows]
        without = [sum(step - spent for step, spent in window) / len(window) for window in windows]
        ratios = [with_it / rest for with_it, rest in zip(taken, without, strict=True)]
        return time_row(what, ratios, taken, without, target)
