"""A callback that measures the time of a step and the bytes of optimizer state."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from gradpolicy.checks import check_whole
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.masked_optimizer import bytes_of


class Costs(Callback):
    """Measures the cost of training, and logs it at the end of each epoch.

    - ``cost/step_milliseconds``: mean time of a batch, from before new masks are computed to after the
      update, without validation, checkpoints and loading. On a GPU it is the host's time, which over many
      batches equals the device's.
    - ``cost/step_cpu_milliseconds``: the same in processor time of the process, over all its threads, which
      depends less on other load of the machine.
    - ``cost/optimizer_bytes_peak``: the maximum of the bytes of optimizer state after any batch on this
      process: moments, steps, masks and ages, without the gradients that mask sources accumulate.

    Args:
        skip: The number of batches at the start that are not timed, for warm-up.

    Raises:
        PolicyError: If ``skip`` is negative.
    """

    def __init__(self, skip: int = 10) -> None:
        self.skip = check_whole("callbacks.costs.skip", skip, least=0)
        self._reset()

    def _reset(self) -> None:
        self.batches = 0
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self.peak_bytes = 0
        self._began = (0.0, 0.0)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the costs; a resumed run starts with new ones."""
        self._reset()

    def on_train_batch_start(self, *arguments: Any) -> None:
        """Read the clocks."""
        self._began = (time.perf_counter(), time.process_time())

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        """Add up the batch's time, and measure the state."""
        seconds, cpu_seconds = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        self.batches += 1
        if self.batches > self.skip:
            self.seconds += seconds
            self.cpu_seconds += cpu_seconds
        present = sum(optimizer_bytes(optimizer) for optimizer in trainer.optimizers)
        self.peak_bytes = max(self.peak_bytes, present)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the costs so far; the times only if there were more batches than are skipped."""
        costs = {"cost/optimizer_bytes_peak": float(self.peak_bytes)}
        timed = self.batches - self.skip
        if timed > 0:
            costs["cost/step_milliseconds"] = 1000 * self.seconds / timed
            costs["cost/step_cpu_milliseconds"] = 1000 * self.cpu_seconds / timed
        pl_module.log_dict(costs)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state on this process.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(10))
        >>> weight.grad = torch.ones(10)
        >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        >>> optimizer.step()
        >>> optimizer_bytes(optimizer)
        40
    """
    if isinstance(optimizer, MaskedOptimizer):
        return optimizer.state_bytes()
    return bytes_of(optimizer.state)
