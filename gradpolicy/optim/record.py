"""Jobs written down once for a kernel, and followed from step to step while all lies as it did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradpolicy.optim.adam import Job, Settings


class GroupNumbers:
    """A param group's numbers at one step.

    Attributes:
        settings: the group's settings.
        constants: what a kernel makes of them once.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.constants: tuple[float, ...] = ()
        self._pairs: dict[tuple[tuple[int, ...], int], tuple[float, ...]] = {}

    def pairs(self, births: tuple[int, ...], clock: int) -> tuple[float, ...]:
        """Corrections of each slot: lr / (1 - b1^t) and 1 / sqrt(1 - b2^t), one after the other.

        Tensors that have been masked at the same steps share them.
        """
        found = self._pairs.get((births, clock))
        if found is None:
            corrections = zip(
                *self.settings.corrections(tuple(clock - birth for birth in births)), strict=True
            )
            found = tuple(part for size, root in corrections for part in (size, 1 / root))
            self._pairs[births, clock] = found
        return found


class KeptJob(ABC):
    """A job as a kernel reads it.

    Every address is compared or read anew at each step. What belongs to the masks (codes, index, births)
    stays: a change of the mask makes a new record.

    Args:
        job: what to do, one that the kernel takes.
        births: clock at which each active slot had age 0.
    """

    counts_up = False
    """Whether the kernel counts the tensor's step up too."""

    def __init__(self, job: Job, births: tuple[int, ...]) -> None:
        self.births = births
        self._vectors = [job.parameter, job.gradient, *job.moments]
        self._of_the_mask = (job.codes, job.held, job.rows)
        self._kept: tuple[tuple[Tensor, int], ...] = ()
        self._form: tuple[Any, ...] = ()

    def watch(self, parameter: Tensor, gradient: Tensor, state: Sequence[Tensor]) -> bool:
        """Serve at later steps too; False where that cannot be.

        Args:
            parameter: what the job updates.
            gradient: its gradient.
            state: its moments and, last, its step count.
        """
        *moments, _ = state
        if addresses(self._vectors) != addresses([parameter, gradient, *moments]):
            return False
        self._kept = tuple((each, each.data_ptr()) for each in state)
        self._form = (*_form(parameter), *_form(gradient))
        self._vectors = []
        return True

    def follow(self, parameter: Tensor, gradient: Tensor, state: Sequence[Tensor | None]) -> bool:
        """Whether all lies as when it was watched, except that parameter and gradient may have moved."""
        if len(state) != len(self._kept):
            return False
        for tensor, (last, address) in zip(state, self._kept, strict=True):
            if tensor is not last or last.data_ptr() != address:
                return False
        if (*_form(parameter), *_form(gradient)) != self._form:
            return False
        self.place(parameter.data_ptr(), gradient.data_ptr())
        return True

    @abstractmethod
    def place(self, parameter: int, gradient: int) -> None:
        """Take the addresses of parameter and gradient."""

    @abstractmethod
    def correct(self, numbers: Any, clock: int, births: tuple[int, ...] | None = None) -> None:
        """Use these numbers, and the ages at this clock; with `births`, not the job's but these."""


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where tensors begin."""
    return [tensor.data_ptr() for tensor in tensors]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """What must be the same for an address to mean the same."""
    return type(tensor), tensor.dtype, tensor.device, tensor.stride(), tensor.numel()
