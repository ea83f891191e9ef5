"""Adam by each entry's own age for many tensors: one call of a kernel for all that it can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim import adam, moves
from gradpolicy.optim.gpu import adam as gpu_adam
from gradpolicy.optim.layout import is_sharded
from gradpolicy.optim.native import adam as native_adam
from gradpolicy.optim.tracked import Tracked

Member = tuple[Tracked, Tensor]


def update(groups: Iterable[tuple[dict[str, Any], Sequence[Member]]], scale: float) -> None:
    """Update tensors and count the update.

    Args:
        groups: a param group each, and those of its tensors that this is for, with their gradients.
        scale: what the gradients were multiplied by.
    """
    together = _Round(scale)
    for group, members in groups:
        if members:
            together.add(group, members)
    together.run()


class _Round:
    """One update of many tensors."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.members: list[Tracked] = []
        self.records: list[native_adam.Record] = []
        self.on_gpu: list[gpu_adam.Record] = []
        self.of_gpu: list[tuple[Tracked, dict[str, Any], adam.Settings, Tensor]] = []
        self.jobs: list[adam.Job] = []
        self.steps: list[Tensor] = []
        self.numbers: list[native_adam.Numbers] = []

    def add(self, group: dict[str, Any], members: Sequence[Member]) -> None:
        """Note what is to be done for tensors of a param group."""
        settings, keys = adam.Settings.of(group, self.scale), [*adam.moment_keys(group), "step"]
        numbers = native_adam.Numbers(settings)
        self.numbers.append(numbers)
        for tracked, gradient in members:
            self.members.append(tracked)
            record, state = tracked.record, tracked.state
            kept = [state.get(key) for key in keys]
            if record is None or not record.follow(tracked.parameter, gradient, kept):
                record = self._prepare(tracked, group, settings, gradient, keys)
            if record is None:
                continue
            if tracked.bias_correction == "tensor":
                record.correct(numbers, tracked.updates, (0,))
            else:
                record.correct(numbers, tracked.cohorts.clock)
            if not record.counts_up:
                self.steps.append(tracked.state["step"])
            if isinstance(record, gpu_adam.Record):
                self.on_gpu.append(record)
                self.of_gpu.append((tracked, group, settings, gradient))
            else:
                self.records.append(record)

    def _prepare(
        self,
        tracked: Tracked,
        group: dict[str, Any],
        settings: adam.Settings,
        gradient: Tensor,
        keys: Sequence[str],
    ) -> native_adam.Record | gpu_adam.Record | None:
        """What a kernel is to do for a tensor that it does not know as it is now; None where it cannot."""
        job, state, parameter = tracked.job(group, settings, gradient), tracked.state, tracked.parameter
        kinds = ((gpu_adam.takes, gpu_adam.Record), (native_adam.takes, native_adam.Record))
        kind = next((kind for takes, kind in kinds if takes(job)), None)
        tracked.record = None
        if kind is None:
            self.jobs.append(job)
            self.steps.append(state["step"])
            return None
        record = kind(job, tuple(tracked.cohorts.births))
        if not is_sharded(parameter) and record.watch(parameter, gradient, [state[key] for key in keys]):
            tracked.record = record
        return record

    def run(self) -> None:
        """Do it all."""
        for index in gpu_adam.run(self.on_gpu):
            tracked, group, settings, gradient = self.of_gpu[index]
            tracked.record = None
            self.jobs.append(tracked.job(group, settings, gradient))
        moves.update(self.jobs)
        if self.records:
            native_adam.run(self.records)
        if self.records or self.on_gpu:
            # Autograd must see that what it may have saved is no longer there.
            torch.autograd.graph.increment_version([tracked.parameter for tracked in self.members])
        if self.steps:
            torch._foreach_add_(self.steps, 1)
        for tracked in self.members:
            tracked.finish()
