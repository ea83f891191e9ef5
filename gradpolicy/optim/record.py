"""Jobs written down once for a kernel, and followed from step to step while all lies as it did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, NamedTuple

from torch import Tensor

from gradpolicy.optim.adam import Job, Settings

State = Mapping[str, Any]
_VALUES = methodcaller("values")
_FORM = (type, attrgetter("dtype", "device"), Tensor.stride, Tensor.numel)


class Numbers(NamedTuple):
    """What tensors of one param group whose entries have the same ages share at one step.

    Attributes:
        settings: the group's settings.
        pairs: of each slot lr / (1 - b1^t) and 1 / sqrt(1 - b2^t), one after the other.
    """

    settings: Settings
    pairs: tuple[float, ...]

    @classmethod
    def of(cls, settings: Settings, ages: tuple[int, ...]) -> Numbers:
        """The numbers for slots of these ages."""
        corrections = zip(*settings.corrections(ages), strict=True)
        return cls(settings, tuple(part for size, root in corrections for part in (size, 1 / root)))


class KeptJob(ABC):
    """A job as a kernel reads it.

    What belongs to the masks (codes, index) stays: a change of the mask makes a new record.

    Args:
        job: what to do, one that the kernel takes.

    Attributes:
        amsgrad: whether it has the maximum of second moments.
        coupled: whether weight decay goes through the gradient.
        state: while it is watched, the tensors of the state and where they lie.
        form: the same of parameter and gradient but for their addresses.
        places: addresses of parameter and gradient.
        moments: addresses of the moments.
    """

    counts_up = False
    """Whether the kernel counts the tensor's step up too."""

    def __init__(self, job: Job) -> None:
        self.amsgrad, self.coupled = job.settings.amsgrad, job.settings.coupled
        self.places = (job.parameter.data_ptr(), job.gradient.data_ptr())
        self.state: tuple[tuple[Tensor, ...], list[int]] = ((), [])
        self.form: tuple[Any, ...] = ()
        self.moments = addresses(job.moments)
        self._of_the_mask: tuple[Any, ...] = (job.codes, job.held, job.rows)
        # Some may be copies that nothing else holds.
        self._vectors = [job.parameter, job.gradient, *job.moments]

    def watch(self, parameter: Tensor, gradient: Tensor, moments: Sequence[Tensor], state: State) -> bool:
        """Serve at later steps too; False where that cannot be.

        Args:
            parameter: what the job updates.
            gradient: its gradient.
            moments: its moments, which are in `state` too.
            state: its state, with the step count.
        """
        values = tuple(state.values())
        if not all(isinstance(value, Tensor) for value in values) or addresses(moments) != self.moments:
            return False
        if self.places != (parameter.data_ptr(), gradient.data_ptr()):
            return False
        self.state = values, addresses(values)
        self.form = _forms([parameter], [gradient])[0]
        self._vectors = []
        return True

    def forget(self) -> None:
        """Let go of what it was made of."""
        self.state, self._of_the_mask = ((), []), ()

    def move(self, parameter: int, gradient: int) -> None:
        """Take the addresses of parameter and gradient."""
        self.places = (parameter, gradient)
        self.place(parameter, gradient)

    @abstractmethod
    def place(self, parameter: int, gradient: int) -> None:
        """Write these addresses down."""


def follow(
    records: Sequence[KeptJob], parameters: list[Tensor], gradients: list[Tensor], states: Iterable[State]
) -> bool:
    """Whether all lies as when records were watched, but for parameters and gradients, which are followed.

    All are looked at together, a property at a time, which takes Python a fraction of what one by one would.

    Args:
        records: what was watched, with a parameter, a gradient and a state each.
        parameters: the parameters.
        gradients: the gradients, which may be others than before.
        states: the states.
    """
    values = [*chain.from_iterable(map(_VALUES, states))]
    stands = (
        same(values, [*chain.from_iterable(record.state[0] for record in records)])
        and addresses(values) == [*chain.from_iterable(record.state[1] for record in records)]
        and _forms(parameters, gradients) == [record.form for record in records]
    )
    if stands:
        places = zip(addresses(parameters), addresses(gradients), strict=True)
        for record, place in zip(records, places, strict=True):
            if record.places != place:
                record.move(*place)
    return stands


def same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether these are the very same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where tensors begin."""
    return [*map(Tensor.data_ptr, tensors)]


def _forms(parameters: list[Tensor], gradients: list[Tensor]) -> list[tuple[Any, ...]]:
    """Of each parameter and its gradient what must be the same for an address to mean the same."""
    looks = [map(look, tensors) for tensors in (parameters, gradients) for look in _FORM]
    return [*zip(*looks, strict=True)]
