"""Adam by each entry's own age for many tensors: one call of a kernel for all that it can do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim import adam, moves
from gradpolicy.optim.adam import Settings
from gradpolicy.optim.gpu import adam as gpu_adam
from gradpolicy.optim.layout import is_sharded
from gradpolicy.optim.native import adam as native_adam
from gradpolicy.optim.record import Numbers, follow, same
from gradpolicy.optim.tracked import Tracked

Group = dict[str, Any]
Member = tuple[Tracked, Tensor]
"""A tensor and its gradient."""
Members = Sequence[tuple[Group, Sequence[Member]]]
"""A param group each, and those of its tensors that an update is for."""

_RECORD_AND_CORRECTION = attrgetter("record", "bias_correction")


class Updates:
    """The exact updates of an optimizer. What was written down for one serves the next while it holds."""

    def __init__(self) -> None:
        self._last: _Update | None = None

    def __call__(self, groups: Members, scale: float) -> None:
        """Update tensors and count the update.

        Args:
            groups: what to update.
            scale: what the gradients were multiplied by.
        """
        groups = [(group, members) for group, members in groups if members]
        if not groups:
            self._last = None
            return
        settings = [Settings.of(group, scale) for group, _ in groups]
        update = self._last
        if update is None or not update.holds(groups, settings):
            update = _Update(groups, settings)
        self._last = update if update.lasts else None
        update.run(groups, settings)


class _Update:
    """One update of many tensors, and those that follow while nothing but addresses changes.

    Attributes:
        lasts: whether it serves at later steps too.
    """

    def __init__(self, groups: Members, settings: Sequence[Settings]) -> None:
        self.lasts = True
        self._members = [tracked for _, members in groups for tracked, _ in members]
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self._native: list[tuple[native_adam.Record, int]] = []
        self._on_gpu: list[tuple[gpu_adam.Record, int]] = []
        self._gpu_members: list[tuple[int, int]] = []
        self._jobs: list[adam.Job] = []
        self._steps: list[Tensor] = []
        self._count = 0
        for index, (group, members) in enumerate(groups):
            for place, (tracked, gradient) in enumerate(members):
                record = self._record_of(tracked, group, settings[index], gradient)
                if record is None:
                    continue
                numbers = self._numbers.setdefault((index, _ages(tracked)), len(self._numbers))
                if isinstance(record, gpu_adam.Record):
                    self._on_gpu.append((record, numbers))
                    self._gpu_members.append((index, place))
                else:
                    self._native.append((record, numbers))
                if not record.counts_up:
                    self._steps.append(tracked.state["step"])
        self._batch = native_adam.Batch(self._native)
        self._gpu_batch = gpu_adam.Batch(self._on_gpu)
        if self.lasts:
            self._remember(groups, settings)

    def _record_of(
        self, tracked: Tracked, group: Group, settings: Settings, gradient: Tensor
    ) -> native_adam.Record | gpu_adam.Record | None:
        """What a kernel is to do for a tensor; None where none can."""
        record, parameter = tracked.record, tracked.parameter
        known = record is not None and (record.amsgrad, record.coupled) == (
            settings.amsgrad,
            settings.coupled,
        )
        if record is not None and known and follow([record], [parameter], [gradient], [tracked.state]):
            return record
        job = tracked.job(group, settings, gradient)
        kinds = ((gpu_adam.takes, gpu_adam.Record), (native_adam.takes, native_adam.Record))
        kind = next((kind for takes, kind in kinds if takes(job)), None)
        tracked.record = None
        if kind is None:
            self._jobs.append(job)
            self._steps.append(tracked.state["step"])
            self.lasts = False
            return None
        record, state = kind(job), tracked.state
        moments = [state[key] for key in adam.moment_keys(group)]
        if not is_sharded(parameter) and record.watch(parameter, gradient, moments, state):
            tracked.record = record
        else:
            self.lasts = False
        return record

    def _remember(self, groups: Members, settings: Sequence[Settings]) -> None:
        """Note what must be the same for this update to serve again."""
        self._counts, self._switches = _counts(groups), _switches(settings)
        self._as_made = [*map(_RECORD_AND_CORRECTION, self._members)]
        self._records = [record for record, _ in self._as_made]
        self._parameters = [tracked.parameter for tracked in self._members]
        self._known = [*self._members[0].inner.state]
        places = {id(parameter): place for place, parameter in enumerate(self._known)}
        self._state_places = [places[id(parameter)] for parameter in self._parameters]

    def holds(self, groups: Members, settings: Sequence[Settings]) -> bool:
        """Whether it is right for these too; then it has followed what has moved."""
        members = [tracked for _, members in groups for tracked, _ in members]
        right = (
            same(members, self._members)
            and _counts(groups) == self._counts
            and _switches(settings) == self._switches
            and [*map(_RECORD_AND_CORRECTION, members)] == self._as_made
            and same([*members[0].inner.state], self._known)
        )
        if not right:
            return False
        states = [*members[0].inner.state.values()]
        own = [states[place] for place in self._state_places]
        return follow(self._records, self._parameters, _gradients(groups), own)

    def run(self, groups: Members, settings: Sequence[Settings]) -> None:
        """Do it all, and count it."""
        numbers = [
            Numbers.of(settings[index], tuple(age + self._count for age in ages))
            for index, ages in self._numbers
        ]
        jobs, steps = self._jobs, self._steps
        for failed in self._gpu_batch.run(numbers):
            index, place = self._gpu_members[failed]
            group, members = groups[index]
            tracked, gradient = members[place]
            jobs.append(tracked.job(group, settings[index], gradient))
            if tracked.record is not None and tracked.record.counts_up:
                steps.append(tracked.state["step"])
            tracked.record, self.lasts = None, False
        moves.update(jobs)
        self._batch.run(numbers)
        # Autograd must see that what it may have saved is no longer there.
        torch.autograd.graph.increment_version([tracked.parameter for tracked in self._members])
        if steps:
            torch._foreach_add_(steps, 1)
        for tracked in self._members:
            tracked.finish()
        self._count += 1


def _ages(tracked: Tracked) -> tuple[int, ...]:
    """The age of each active slot, or that of the whole tensor."""
    if tracked.bias_correction == "tensor":
        return (tracked.updates,)
    clock = tracked.cohorts.clock
    return tuple([clock - birth for birth in tracked.cohorts.births])


def _gradients(groups: Members) -> list[Tensor]:
    return [*map(itemgetter(1), chain.from_iterable(map(itemgetter(1), groups)))]


def _counts(groups: Members) -> list[int]:
    return [len(members) for _, members in groups]


def _switches(settings: Sequence[Settings]) -> list[tuple[bool, bool]]:
    """What the code of an update depends on."""
    return [(each.amsgrad, each.coupled) for each in settings]
