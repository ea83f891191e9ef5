"""Compares frozen entries at the begin and the end of each interval between changes of masks."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradpolicy.freezing import Freezer
from gradpolicy.insight.fingerprints import fingerprint, words
from gradpolicy.optim.initial_state import entry_state
from gradpolicy.optim.layout import local_mask
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.tensors.hashing import derive
from gradpolicy.tensors.mask import Mask, as_tensor
from gradpolicy.tensors.seeded_mask import RandomMask
from gradpolicy.tensors.sharding import is_sharded, local_shard

# The first and the last index but one, in each dimension.
Box = tuple[tuple[int, int], ...]

INDICES_TOLD = 10


@dataclass(frozen=True)
class Difference:
    """Frozen entries of one tensor that changed.

    Attributes:
        tensor: The parameter's name.
        what: ``"weight"``, or ``"state <name>"`` of the optimizer.
        policies: The freeze policies on it.
        count: How many of the entries that were compared changed.
        compared: How many were compared.
        since: Updates when they were last known to be right.
        step: Updates when it was found.
        indices: The first that changed; of a sharded parameter within this process's part.
    """

    tensor: str
    what: str
    policies: tuple[str, ...]
    count: int
    compared: int
    since: int
    step: int
    indices: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        places = ", ".join(map(str, self.indices[:3])) + (", …" if self.count > 3 else "")
        return (
            f"{self.tensor} (policy.{', policy.'.join(self.policies)}): {self.count} of {self.compared} frozen "
            f"entries of the {self.what} changed between update {self.since} and update {self.step}, at {places}; "
            "something other than the masked optimizer wrote to them"
        )


@dataclass
class Interval:
    """Entries of one parameter, as they were when they were last known to be right.

    Attributes:
        name: The parameter's name.
        box: Which of this process's entries.
        step: Updates when it began.
        frozen: Which of them are frozen (bool, 1-D).
        bits: The words of the weight, and of state that is kept, by what it is.
        prints: Their fingerprints.
    """

    name: str
    box: Box
    step: int
    frozen: Tensor
    bits: dict[str, Tensor]
    prints: dict[str, Tensor]


@dataclass
class Counts:
    """What was compared so far.

    Attributes:
        intervals: Intervals of single parameters.
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
    """Watches frozen entries of a freezer's parameters, on their device.

    An interval of a parameter begins when its mask is set. It ends when the mask is about to change, after
    `every` updates, or when :meth:`renew` or :meth:`close` is called. Then fingerprints tell whether a bit
    has changed, and the copy of the bits tells how many entries and which. Weights are compared, and state
    under ``frozen_state="keep"``.

    Args:
        freezer: Sets the masks.
        entries: The most entries that are watched at a time: a box of one tensor, another one each time, so
            that after enough turns each was watched. None watches all, with the copies in the host's memory.
        every: Updates after which other entries are chosen. If masks change sooner, nothing is watched
            until then, unless all is.
        seed: Where the turns begin.
        found: Is called with what had changed when masks change or other entries are chosen.
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
        self._open: dict[str, Interval] = {}
        self._next_choice = 0
        freezer.observers.append(self)

    # ---- when

    def before_masks(self, names: Collection[str]) -> None:
        """Ends the intervals of parameters whose masks are about to change."""
        self._found(self._close([name for name in self._open if name in names]))

    def after_masks(self, names: Collection[str]) -> None:
        """Begins intervals under the new masks."""
        if self._is_due():
            self._choose()
        elif self._entries is None:
            self._begin((name, box) for name, box in self._all_boxes() if name in names)

    def look(self) -> None:
        """Compares what was watched for long enough, and chooses other entries. Masks stay as they are."""
        if self._is_due():
            self._found(self._close(list(self._open)))
            self._choose()

    def renew(self) -> list[Difference]:
        """Ends all intervals, where the run is saved, and begins the next ones.

        A run that is resumed there begins the same ones. If masks change at once, nothing is counted twice.

        Returns:
            What had changed.
        """
        differences = self._close(list(self._open))
        self._begin(self._chosen_boxes())
        self._next_choice = self.updates
        return differences

    def close(self) -> list[Difference]:
        """Ends all intervals.

        Returns:
            What had changed.
        """
        return self._close(list(self._open))

    def detach(self) -> None:
        """Is told of no more changes."""
        self._freezer.observers.remove(self)

    @property
    def updates(self) -> int:
        """Updates that took place."""
        return max((getattr(each, "effective_steps", 0) for each in self._freezer.optimizers), default=0)

    def _is_due(self) -> bool:
        return self.updates >= self._next_choice

    # ---- which entries

    def _choose(self) -> None:
        self._next_choice = self.updates + self._every
        boxes = list(self._chosen_boxes())
        self._begin(boxes)
        self.counts.chosen += 1
        self.counts.watched += sum(map(_size, (box for _, box in boxes)))
        self.counts.candidates += sum(local_shard(p).numel() for _, p in self._candidates())

    def _candidates(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters with frozen entries, each once, of which this process holds a part."""
        seen: set[int] = set()
        for name, parameter in self._freezer.parameters.items():
            if self._freezer.mask_of(name) is not True and id(parameter) not in seen:
                seen.add(id(parameter))
                if local_shard(parameter).numel():
                    yield name, parameter

    def _all_boxes(self) -> Iterator[tuple[str, Box]]:
        for name, parameter in self._candidates():
            yield name, tuple((0, size) for size in local_shard(parameter).shape)

    def _chosen_boxes(self) -> Iterator[tuple[str, Box]]:
        """All entries, or the box whose turn it is."""
        if self._entries is None:
            yield from self._all_boxes()
            return
        grids = [(name, _grid(local_shard(p).shape, self._entries)) for name, p in self._candidates()]
        total = sum(grid.count for _, grid in grids)
        if not total:
            return
        place = turn(self.counts.chosen, total, self._seed)
        for name, grid in grids:
            if place < grid.count:
                yield name, grid.box(place)
                return
            place -= grid.count

    # ---- begin and end

    @torch.no_grad()
    def _begin(self, boxes: Iterable[tuple[str, Box]]) -> None:
        for name, box in boxes:
            parameter = self._freezer.parameters[name]
            frozen = frozen_entries(self._freezer.mask_of(name), parameter, box)
            bits = self._bits(name, box)
            prints = {what: fingerprint(own, frozen) for what, own in bits.items()}
            # Copies of everything would double the device's memory.
            place = torch.device("cpu") if self._entries is None else frozen.device
            kept = {what: own.to(place, copy=True) for what, own in bits.items()}
            self._open[name] = Interval(name, box, self.updates, frozen, kept, prints)

    @torch.no_grad()
    def _close(self, names: Iterable[str]) -> list[Difference]:
        intervals = [self._open.pop(name) for name in names]
        if not intervals:
            return []
        now = [self._bits(each.name, each.box) for each in intervals]
        # One reading for all: a device is waited for once.
        read: list[Tensor] = []
        for each, bits in zip(intervals, now, strict=True):
            read.append(each.frozen.sum())
            for what, before in each.prints.items():
                after = fingerprint(bits[what], each.frozen) if what in bits else ~before
                read.append(before - after)
        numbers = iter(torch.stack([number.to(read[0].device) for number in read]).tolist())
        differences = []
        for each, bits in zip(intervals, now, strict=True):
            frozen = next(numbers)
            if self.updates > each.step and frozen:
                self.counts.intervals += 1
                self.counts.entries += frozen * len(each.prints)
            changed = [what for what in each.prints if next(numbers)]
            differences += [self._difference(each, what, bits.get(what), frozen) for what in changed]
        self.counts.changed += sum(each.count for each in differences)
        return differences

    def _difference(self, interval: Interval, what: str, now: Tensor | None, compared: int) -> Difference:
        changed = interval.frozen
        if now is not None:
            before = interval.bits[what].to(now.device)
            changed = (before != now).any(1) & interval.frozen
        lengths = [stop - start for start, stop in interval.box]
        first = changed.nonzero().view(-1)[:INDICES_TOLD].cpu()
        offsets = torch.unravel_index(first, lengths) if lengths else ()
        found = [own + start for own, (start, _) in zip(offsets, interval.box, strict=True)]
        indices = torch.stack(found, 1).tolist() if found else [[]]
        return Difference(
            tensor=interval.name,
            what=what,
            policies=tuple(p for p in self._freezer.policies if interval.name in self._freezer.parameters_of(p)),
            count=int(changed.sum()),
            compared=compared,
            since=interval.step,
            step=self.updates,
            indices=tuple(map(tuple, indices)),
        )

    def _bits(self, name: str, box: Box) -> dict[str, Tensor]:
        parameter = self._freezer.parameters[name]
        tensors = {"weight": parameter.detach()}
        for masked in self._masked(parameter):
            if masked.frozen_state == "keep":
                own = entry_state(masked.state, parameter)
                tensors |= {f"state {key}": value for key, value in own.items()}
        return {what: words(narrowed(local_shard(tensor), box)) for what, tensor in tensors.items()}

    def _masked(self, parameter: Tensor) -> Iterator[MaskedParameter]:
        """What the optimizers that hold state of a parameter know of it."""
        for optimizer in self._freezer.optimizers:
            # Under ZeRO state lies in the local optimizer of one rank.
            holder = getattr(optimizer, "local", optimizer)
            masked = holder.masked_parameters().get(parameter)
            if masked is not None:
                yield masked


@dataclass(frozen=True)
class Grid:
    """A tensor cut into boxes.

    Attributes:
        shape: The tensor's shape.
        lengths: The size of a box in each dimension; the last ones may be smaller.
    """

    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    counts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        counts = (math.ceil(size / length) for size, length in zip(self.shape, self.lengths, strict=True))
        object.__setattr__(self, "counts", tuple(counts))

    @property
    def count(self) -> int:
        """How many boxes there are."""
        return math.prod(self.counts)

    def box(self, number: int) -> Box:
        """One of the boxes."""
        found = []
        for size, length, count in reversed(list(zip(self.shape, self.lengths, self.counts, strict=True))):
            number, place = divmod(number, count)
            found.append((place * length, min((place + 1) * length, size)))
        return tuple(reversed(found))


def _grid(shape: Sequence[int], most: int) -> Grid:
    """Cuts a tensor into boxes of at most so many entries, as long as they can be in the last dimensions."""
    lengths = []
    for size in reversed(shape):
        lengths.append(max(1, min(size, most)))
        most //= lengths[-1]
    return Grid(tuple(shape), tuple(reversed(lengths)))


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def turn(number: int, total: int, seed: int = 0) -> int:
    """The place of a turn: `total` turns in a row visit each place once.

    Example:
        >>> sorted(turn(number, 7) for number in range(7))
        [0, 1, 2, 3, 4, 5, 6]
    """
    # About the golden section, so that few turns are spread over all places.
    stride = next(step for step in range(int(0.618 * total) + 1, 2 * total + 2) if math.gcd(step, total) == 1)
    return (derive("audit", seed) + number * stride) % total


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """The part of a tensor in a box; a dimension of size 1 stands for all of it."""
    for dim, (start, stop) in enumerate(box):
        if tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def frozen_entries(mask: Mask, parameter: Tensor, box: Box) -> Tensor:
    """Which entries of a box of this process's part of a parameter are frozen.

    Args:
        mask: The mask in force on the whole parameter.
        parameter: The parameter.
        box: Part of its local shard.

    Returns:
        A flag for each entry (bool, 1-D), on the parameter's device.
    """
    lengths = [stop - start for start, stop in box]
    device = local_shard(parameter).device
    if isinstance(mask, bool):
        return torch.full((math.prod(lengths),), not mask, device=device)
    if isinstance(mask, RandomMask) and not is_sharded(parameter) and box:
        start, stop = box[0]
        active = mask.materialize(parameter.shape, device, start=start, stop=stop)
        box = ((0, stop - start), *box[1:])
    else:
        active = as_tensor(mask, parameter.shape, device)
        active = local_mask(active.reshape((1,) * (len(box) - active.dim()) + tuple(active.shape)), parameter)
    return ~narrowed(active.to(device), box).expand(lengths).reshape(-1)
