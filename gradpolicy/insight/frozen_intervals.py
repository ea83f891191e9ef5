"""Compares frozen entries at the begin and the end of each interval between changes of masks."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradpolicy.freezing import Freezer
from gradpolicy.insight.boxes import Box, Grid, frozen_entries, indices_in, narrowed, size_of, turn
from gradpolicy.insight.fingerprints import fingerprint, words
from gradpolicy.optim.initial_state import entry_state
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.tensors.sharding import local_shard

# A parameter's name, and the number of the box.
Key = tuple[str, int]

INDICES_TOLD = 10
# Boxes that are compared when a checkpoint is saved and at the end, if not all are.
AT_A_STOP = 64


@dataclass(frozen=True)
class Difference:
    """Frozen entries of one tensor that changed.

    Attributes:
        tensor: The parameter's name.
        what: ``"weight"``, or ``"state <name>"`` of the optimizer.
        policies: The freeze policies on it.
        count: How many of the entries that were compared changed; 1 where only a fingerprint tells.
        compared: How many were compared.
        since: Updates when they were last known to be right.
        step: Updates when it was found.
        indices: The first that changed, where that is known; of a sharded parameter within the part of this
            process.
    """

    tensor: str
    what: str
    policies: tuple[str, ...]
    count: int
    compared: int
    since: int
    step: int
    indices: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        count = f"{self.count} of {self.compared}"
        places = f", at {', '.join(map(str, self.indices[:3]))}{', …' if self.count > 3 else ''}"
        if not self.indices:
            count, places = f"at least 1 of the {self.compared} compared", " (audit=full counts them)"
        when = f"between update {self.since} and update {self.step}"
        if self.since == self.step:
            when = f"after update {self.step}"
        return (
            f"{self.tensor} (policy.{', policy.'.join(self.policies)}): {count} frozen entries of the "
            f"{self.what} changed {when}{places}; something other than the masked optimizer wrote to them"
        )


@dataclass(frozen=True)
class Begin:
    """What is known of a box since its interval began.

    Attributes:
        step: Updates then.
        prints: The fingerprints of its frozen entries, by ``"weight"`` and ``"state <name>"``.
        bits: The words themselves, in the host's memory; empty if only fingerprints are kept.
    """

    step: int
    prints: dict[str, int]
    bits: dict[str, Tensor]


@dataclass(frozen=True)
class Look:
    """What a box holds now.

    Attributes:
        key: Which box of which parameter.
        box: Where it lies.
        frozen: Which of its entries are frozen (bool, 1-D).
        bits: The words of the weight and of state, by what they are.
        prints: The fingerprints of what is frozen of these, on the device.
    """

    key: Key
    box: Box
    frozen: Tensor
    bits: dict[str, Tensor]
    prints: dict[str, Tensor]


@dataclass
class Counts:
    """What was compared so far.

    Attributes:
        intervals: Intervals of single boxes.
        entries: Frozen entries in these, of weights and of state.
        changed: Those that had changed.
        watched: Entries in all boxes that were chosen.
        candidates: Entries of all tensors of which these were chosen.
        chosen: How often boxes were chosen.
    """

    intervals: int = 0
    entries: int = 0
    changed: int = 0
    watched: int = 0
    candidates: int = 0
    chosen: int = 0


class FrozenIntervals:
    """Compares frozen entries of a freezer's parameters, on their device.

    Weights are compared, and state under ``frozen_state="keep"``. A look takes the fingerprints of frozen
    entries. It begins their interval, and it ends the one before, if the mask has not changed between.

    Args:
        freezer: Sets the masks.
        entries: The most entries of one look: a box of one tensor. Looks take turns, so that each box is
            looked at again after as many looks as there are boxes. When masks change, the box that was looked
            at longest ago is compared once more. None looks at all tensors each time and before each change,
            and keeps copies in the host's memory, to count and to find what has changed.
        every: Looks are due at multiples of this many updates, and after the first update.
        seed: Where the turns begin.
        found: Is called with what had changed, in the middle of training.
    """

    def __init__(
        self,
        freezer: Freezer,
        *,
        entries: int | None,
        every: int,
        seed: int,
        found: Callable[[Sequence[Difference]], None],
    ) -> None:
        self.counts = Counts()
        self._freezer = freezer
        self._entries = entries
        self._every = every
        self._seed = seed
        self._found = found
        # By parameter and number of the box; first what was looked at longest ago.
        self._begun: dict[Key, Begin] = {}
        self._next_look = 0
        self._optimizers: list[Any] = freezer.optimizers
        freezer.observers.append(self)

    # ---- when

    def before_masks(self, names: Collection[str]) -> None:
        """Compares under the old masks, for the last time."""
        concerned = [key for key in self._begun if key[0] in names]
        self._found(self._look_at(concerned if self._entries is None else concerned[:1], goes_on=False))
        for key in concerned:
            self._begun.pop(key, None)

    def after_masks(self, names: Collection[str]) -> None:
        """Begins intervals under the new masks."""
        if self._entries is None:
            self._look_at([(name, 0) for name in self._grids() if name in names])
        self.look()

    def look(self, *, now: bool = False) -> None:
        """Takes the next look, if it is due or wanted `now`."""
        if self.updates < self._next_look and not now:
            return
        # The first update makes the state. Later looks fall together with masks that change as often.
        self._next_look = (self.updates // self._every + 1) * self._every if self.updates else 1
        grids = self._grids()
        chosen = self._choose(grids)
        self.counts.chosen += 1
        self.counts.watched += sum(size_of(grids[name].box(number)) for name, number in chosen)
        self.counts.candidates += sum(math.prod(grid.shape) for grid in grids.values())
        self._found(self._look_at(chosen))

    def look_once_more(self, *, goes_on: bool) -> list[Difference]:
        """Compares when a checkpoint is saved, or at the end.

        A run that is resumed from the checkpoint looks again at once, and so does this one.

        Args:
            goes_on: Whether intervals begin anew.

        Returns:
            What had changed.
        """
        self._next_look = self.updates
        most = None if self._entries is None else AT_A_STOP
        return self._look_at(list(self._begun)[:most], goes_on=goes_on)

    def detach(self) -> None:
        """Is told of no more changes."""
        self._freezer.observers.remove(self)

    @property
    def updates(self) -> int:
        """Updates that took place."""
        return max([each.effective_steps for each in self._optimizers])

    # ---- which entries

    def _grids(self) -> dict[str, Grid]:
        """The parameters with frozen entries of which this process holds a part, each once, as boxes."""
        found: dict[int, tuple[str, Grid]] = {}
        for name, parameter in self._freezer.parameters.items():
            if self._freezer.mask_of(name) is not True and id(parameter) not in found:
                grid = Grid.of(local_shard(parameter).shape, self._entries)
                if grid.count:
                    found[id(parameter)] = name, grid
        return dict(found.values())

    def _choose(self, grids: Mapping[str, Grid]) -> list[Key]:
        """All boxes, or the one whose turn it is."""
        if self._entries is None:
            return [(name, 0) for name in grids]
        total = sum(grid.count for grid in grids.values())
        place = turn(self.counts.chosen, total, self._seed) if total else 0
        for name, grid in grids.items():
            if place < grid.count:
                return [(name, place)]
            place -= grid.count
        return []

    # ---- comparing

    @torch.no_grad()
    def _look_at(self, keys: Iterable[Key], *, goes_on: bool = True) -> list[Difference]:
        """Ends the intervals of boxes, where some have begun, and begins the next ones if it `goes_on`."""
        looks = [self._take(*key) for key in keys]
        if not looks:
            return []
        # One reading for all: a device is waited for once.
        device = looks[0].frozen.device
        read = [n.to(device) for look in looks for n in (look.frozen.sum(), *look.prints.values())]
        numbers = iter(torch.stack(read).tolist())
        differences = []
        for look in looks:
            frozen = next(numbers)
            prints = {what: next(numbers) for what in look.prints}
            begin = self._begun.pop(look.key, None)
            if begin is not None and frozen:
                differences += self._compared(look, begin, prints, frozen)
            if goes_on:
                kept = look.bits if self._entries is None else {}
                copies = {what: bits.to("cpu", copy=True) for what, bits in kept.items()}
                self._begun[look.key] = Begin(self.updates, prints, copies)
        return differences

    def _take(self, name: str, number: int) -> Look:
        parameter = self._freezer.parameters[name]
        box = Grid.of(local_shard(parameter).shape, self._entries).box(number)
        frozen = frozen_entries(self._freezer.mask_of(name), parameter, box)
        tensors = {"weight": parameter.detach()}
        for masked in self._masked(parameter):
            if masked.frozen_state == "keep":
                own = entry_state(masked.state, parameter)
                tensors |= {f"state {key}": value for key, value in own.items()}
        bits = {what: words(narrowed(local_shard(tensor), box)) for what, tensor in tensors.items()}
        prints = {what: fingerprint(own, frozen) for what, own in bits.items()}
        return Look((name, number), box, frozen, bits, prints)

    def _compared(self, look: Look, begin: Begin, prints: dict[str, int], frozen: int) -> list[Difference]:
        # State that is gone has changed.
        changed = [what for what, number in begin.prints.items() if prints.get(what) != number]
        # What was looked at twice between two updates is counted once.
        if changed or self.updates > begin.step:
            self.counts.intervals += 1
            self.counts.entries += frozen * len(begin.prints)
        differences = [self._difference(look, begin, what, frozen) for what in changed]
        self.counts.changed += sum(each.count for each in differences)
        return differences

    def _difference(self, look: Look, begin: Begin, what: str, frozen: int) -> Difference:
        count, indices = 1, []
        if what in begin.bits:
            changed = look.frozen.cpu()
            if what in look.bits:
                changed = changed & (look.bits[what].cpu() != begin.bits[what]).any(1)
            count, indices = int(changed.sum()), indices_in(look.box, changed, INDICES_TOLD)
        name = look.key[0]
        return Difference(
            tensor=name,
            what=what,
            policies=tuple(p for p in self._freezer.policies if name in self._freezer.parameters_of(p)),
            count=count,
            compared=frozen,
            since=begin.step,
            step=self.updates,
            indices=tuple(indices),
        )

    def _masked(self, parameter: Tensor) -> Iterator[MaskedParameter]:
        """What the optimizers that hold state of a parameter know of it."""
        for optimizer in self._optimizers:
            # Under ZeRO state lies in the local optimizer of one rank.
            masked = getattr(optimizer, "local", optimizer).masked_parameters().get(parameter)
            if masked is not None:
                yield masked
