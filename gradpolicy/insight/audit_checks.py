"""The checks of the audit: frozen entries, stopped branches, operations."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradpolicy.flow.containers import tensors_in
from gradpolicy.flow.install import Installed
from gradpolicy.freezing import Freezer
from gradpolicy.insight.file_models import AuditDifference, OperationChecks, StopChecks
from gradpolicy.optim.layout import local_mask
from gradpolicy.optim.other_optimizers import entry_state
from gradpolicy.tensors.mask import as_tensor
from gradpolicy.tensors.seeded import derive
from gradpolicy.tensors.sharding import local_shard

# Indices that a difference lists.
INDICES = 10


@dataclass(frozen=True)
class Snapshot:
    """The bits of frozen entries of one parameter at the start of an interval.

    Attributes:
        step: Updates taken by then.
        places: Flat indices of the entries within this process's part of the parameter.
        bits: The bytes of each entry, by ``"weight"`` or ``"state <name>"``.
    """

    step: int
    places: Tensor
    bits: dict[str, Tensor]


class FrozenEntries:
    """Checks that frozen entries keep their bits: weights, and state under ``frozen_state="keep"``.

    An interval begins with a snapshot. It ends when the mask changes, when the next snapshot is due, when a
    checkpoint is saved and when training ends.

    Args:
        freezer: Sets the masks.
        entries: How many random places of each tensor are compared. None means all entries, also right
            after each change of masks; the snapshots then lie in the host's memory.
        every: A snapshot is due at multiples of this many updates, and after the first one, which makes the
            optimizer's state.
        seed: Seeds the places.
        report: Receives what is found in the middle of training.
    """

    def __init__(
        self,
        freezer: Freezer,
        *,
        entries: int | None,
        every: int,
        seed: int,
        report: Callable[[list[AuditDifference]], None],
    ) -> None:
        self.intervals = self.compared = self.changed = 0
        self._freezer, self._entries, self._every, self._seed = freezer, entries, every, seed
        self._report = report
        self._snapshots: dict[str, Snapshot] = {}
        self._next_snapshot = 0
        freezer.observers.append(self)

    def before_masks(self, names: Collection[str]) -> None:
        """End the intervals of parameters whose masks are about to change."""
        ending = {name: self._snapshots.pop(name) for name in names if name in self._snapshots}
        self._report(self._compare(ending))

    def after_masks(self, names: Collection[str]) -> None:
        """Begin intervals under new masks."""
        if self._entries is None:
            self._take_snapshots(names)
        self.renew()

    def renew(self, *, now: bool = False) -> None:
        """End all intervals and begin new ones, if that is due or wanted `now`."""
        if self.updates < self._next_snapshot and not now:
            return
        self._next_snapshot = (self.updates // self._every + 1) * self._every if self.updates else 1
        self._report(self.compare())
        self._take_snapshots(self._freezer.parameters)

    def compare(self) -> list[AuditDifference]:
        """End all intervals."""
        return self._compare(self._snapshots)

    def continue_from_checkpoint(self) -> None:
        """Begin new intervals as a run that is resumed from this checkpoint does."""
        self._next_snapshot = self.updates
        self._take_snapshots([*self._snapshots])

    def detach(self) -> None:
        """Stop observing the freezer."""
        self._freezer.observers.remove(self)

    @property
    def updates(self) -> int:
        """How many updates were taken."""
        optimizers: list[Any] = self._freezer.optimizers
        return max(each.effective_steps for each in optimizers)

    @torch.no_grad()
    def _compare(self, snapshots: Mapping[str, Snapshot]) -> list[AuditDifference]:
        pairs = []
        for name, before in snapshots.items():
            now = self._bits(name, before.places)
            for what, bits in before.bits.items():
                # State that is gone has changed.
                changed = bits.new_ones(len(bits), dtype=torch.bool)
                if what in now:
                    changed = (now[what].to(bits.device) != bits).any(1)
                pairs.append((name, what, before, changed))
        # A device is waited for once.
        counts = torch.stack([changed.sum().cpu() for *_, changed in pairs]).tolist() if pairs else []
        differences = [
            self._difference(*pair, count) for pair, count in zip(pairs, counts, strict=True) if count
        ]
        self.changed += sum(counts)
        # Masks that are set twice between two updates make no interval.
        over = {name: each for name, each in snapshots.items() if self.updates > each.step}
        over |= {each.tensor: snapshots[each.tensor] for each in differences}
        self.intervals += len(over)
        self.compared += sum(len(each.places) * len(each.bits) for each in over.values())
        return differences

    def _difference(
        self, name: str, what: str, before: Snapshot, changed: Tensor, count: int
    ) -> AuditDifference:
        policies = [each for each in self._freezer.policies if name in self._freezer.parameters_of(each)]
        places = before.places[changed.to(before.places.device)][:INDICES].cpu()
        shape = local_shard(self._freezer.parameters[name]).shape
        # A scalar has one entry, without an index.
        indices = torch.stack(torch.unravel_index(places, shape), 1).tolist() if shape else [[]]
        when = f"after update {self.updates}"
        if before.step < self.updates:
            when = f"between update {before.step} and update {self.updates}"
        first = ", ".join(str(tuple(index)) for index in indices[:3])
        return AuditDifference(
            tensor=name,
            what=what,
            policy=", ".join(policies),
            count=count,
            step=self.updates,
            indices=indices,
            message=f"{name} (policy.{', policy.'.join(policies)}): {count} of {len(changed)} frozen entries "
            f"of the {what} changed {when}, at {first}{', …' if count > 3 else ''}; something other than the "
            "masked optimizer wrote to them",
        )

    @torch.no_grad()
    def _take_snapshots(self, names: Iterable[str]) -> None:
        for name in names:
            self._snapshots.pop(name, None)
            places = self._frozen_places(name)
            if len(places):
                bits = self._bits(name, places)
                if self._entries is None:
                    bits = {what: each.to("cpu", copy=True) for what, each in bits.items()}
                self._snapshots[name] = Snapshot(self.updates, places, bits)

    def _frozen_places(self, name: str) -> Tensor:
        """Return flat indices of frozen entries in this process's part of a parameter."""
        parameter, mask = self._freezer.parameters[name], self._freezer.mask_of(name)
        own = local_shard(parameter)
        if mask is True:
            return torch.empty(0, dtype=torch.int64)
        if self._entries is None or own.numel() <= self._entries:
            places = torch.arange(own.numel())
        else:
            # One place in each of so many equal parts of the tensor.
            generator = torch.Generator().manual_seed(derive("audit", self._seed, name, self.updates))
            starts = torch.arange(self._entries + 1) * own.numel() // self._entries
            offsets = torch.rand(self._entries, generator=generator, dtype=torch.float64)
            places = starts[:-1] + (offsets * starts.diff()).long()
        places = places.to(own.device)
        if mask is False:
            return places
        active = as_tensor(mask, parameter.shape, own.device)
        active = local_mask(active.reshape((1,) * (own.dim() - active.dim()) + active.shape), parameter)
        return places[~active.expand(own.shape).reshape(-1)[places]]

    def _bits(self, name: str, places: Tensor) -> dict[str, Tensor]:
        """Return the bytes of entries, of the weight and of state that is kept while it is frozen."""
        parameter = self._freezer.parameters[name]
        tensors = {"weight": parameter.detach()}
        for optimizer in self._freezer.optimizers:
            # Under ZeRO the state lies in the local optimizer of one rank.
            masking: Any = getattr(optimizer, "local", optimizer)
            masked = masking.masked_parameters().get(parameter)
            if masked is not None and not masked.options.forget:
                own = entry_state(masked.state.values, parameter)
                tensors |= {f"state {key}": value for key, value in own.items()}
        return {what: bits_at(local_shard(tensor), places) for what, tensor in tensors.items()}


def bits_at(tensor: Tensor, places: Tensor) -> Tensor:
    """Return the bytes of entries, so that 0.0 and −0.0 differ and NaN equals itself.

    Example:
        >>> bits_at(torch.tensor([0.0, 1.0, -0.0]), torch.tensor([0, 2])).tolist()
        [[0, 0, 0, 0], [0, 0, 0, 128]]
    """
    return tensor.detach().reshape(-1)[places].view(torch.uint8).view(len(places), -1)


class StoppedBranches:
    """Checks that what :class:`gradpolicy.Stop` stops receives exactly zero.

    - What leaves a cut in the graph requires no gradient.
    - Parameters from which all ways to the loss lead through cuts have no gradient. Those that have none in
      the first update that is looked at, and lie behind a cut, are taken for such.
    - What is passed on under ``mode="zero"`` is zero.
    - Parameters that are stopped themselves (``params=``) have no gradient, or zeros.

    Args:
        installed: The flow policies.
        stops: The names of those that stop.
        named: The model's parameters by name.
    """

    def __init__(self, installed: Installed, stops: Iterable[str], named: Mapping[str, Tensor]) -> None:
        self.checks = StopChecks()
        self._named = named
        self._looking = False
        # In this update: the policy, the place, and how many entries or tensors are not as they should be.
        self._seen: list[tuple[str, str, int | Tensor]] = []
        # Parameters behind the cuts of each policy, until an update tells which have another way.
        self._behind: dict[str, set[str]] = {}
        self._walked: set[tuple[str, str]] = set()
        # Parameters that must have no gradient: the policy, and the policies that must hold for it to be so.
        self._stopped: dict[str, tuple[str, frozenset[str]]] = {}
        rows = {row.name: row for row in installed.report().rows}
        for policy in stops:
            installed.observe(policy, self)
            self._stopped |= {name: (policy, frozenset([policy])) for name in rows[policy].parameters}

    def begin_batch(self) -> None:
        """Look at gradients until the next update."""
        self._looking = True
        self._seen.clear()

    def cut(self, policy: str, location: str, tensors: Iterable[Tensor], results: Any) -> None:
        """Look at a cut, and find the parameters behind it."""
        if self._looking:
            self._seen.append((policy, location, sum(each.requires_grad for each in tensors_in(results))))
        if (policy, location) not in self._walked:
            self._walked.add((policy, location))
            leaves = leaves_behind(tensors)
            found = {name for name, parameter in self._named.items() if id(parameter) in leaves}
            self._behind.setdefault(policy, set()).update(found)

    def passed(self, policy: str, gradients: Iterable[Tensor | None]) -> None:
        """Look at gradients that were let through."""
        if self._looking:
            place = "the gradient that it lets through"
            self._seen += [(policy, place, each.count_nonzero()) for each in gradients if each is not None]

    def end_update(self, step: int, active: Iterable[str]) -> list[AuditDifference]:
        """Look at the parameters' gradients after an update.

        Args:
            step: Updates taken so far.
            active: The flow policies that held, if the parameters still have their gradients.

        Returns:
            What was not zero.
        """
        self._looking = False
        holding = frozenset(active)
        for policy in holding & self._behind.keys():
            trains = {name for name in self._behind[policy] if self._named[name].requires_grad}
            self._behind[policy] -= trains
            for name in sorted(trains):
                if self._named[name].grad is None:
                    self._stopped.setdefault(name, (policy, holding))
        for name, (policy, needed) in self._stopped.items():
            if needed <= holding:
                gradient = self._named[name].grad
                wrong = 0 if gradient is None else local_shard(gradient).count_nonzero()
                self._seen.append((policy, name, wrong))
        return [*self._read(step)]

    def _read(self, step: int) -> Iterator[AuditDifference]:
        self.checks.checked += len(self._seen)
        for policy, place, wrong in self._seen:
            if count := int(wrong):
                self.checks.nonzero += 1
                message = (
                    f"policy.{policy}: {place} is stopped, and got a gradient that is not zero in {count} "
                    f"entries in update {step}"
                )
                yield AuditDifference(
                    tensor=place, what="gradient", policy=policy, count=count, step=step, message=message
                )


def leaves_behind(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of the leaf tensors that the graph of some tensors leads to."""
    tensors = list(tensors)
    found = {id(tensor) for tensor in tensors if tensor.is_leaf and tensor.requires_grad}
    seen = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following
    return found


class MetOperations:
    """Checks that each flow policy meets the same operations and places in every batch in which it holds.

    The first batch says what is the same. Compiled code is left out.

    Args:
        installed: The flow policies.
    """

    def __init__(self, installed: Installed) -> None:
        self.checks = OperationChecks()
        self._installed = installed
        self._before: dict[str, dict[str, int]] = {}
        self._after: dict[str, dict[str, int]] = {}
        self._first: dict[str, dict[str, int]] = {}

    def begin_batch(self) -> None:
        """Read the counts before a batch."""
        self._before, self._after = self._installed.matched(), {}

    def end_backward(self) -> None:
        """Read the counts after a backward pass of the batch."""
        self._after = self._installed.matched()

    def end_batch(self, step: int, active: Iterable[str]) -> list[AuditDifference]:
        """Compare a batch with the first one.

        Args:
            step: Updates taken before the batch.
            active: The policies that hold in this batch.
        """
        differences = []
        for policy in active:
            if policy not in self._before or policy not in self._after:
                continue
            before, after = self._before[policy], self._after[policy]
            met = {place: n - before.get(place, 0) for place, n in after.items() if n > before.get(place, 0)}
            first = self._first.setdefault(policy, met)
            self.checks.checked += 1
            if met != first:
                self.checks.differing += 1
                place = next(each for each in (*first, *met) if met.get(each) != first.get(each))
                now, then = met.get(place, 0), first.get(place, 0)
                message = (
                    f"policy.{policy}: {place} was met {now} times in the batch before update {step + 1}, "
                    f"and {then} times in the first; where the forward pass differs from batch to batch on "
                    "purpose, set callbacks.audit.operations=false"
                )
                differences.append(
                    AuditDifference(
                        tensor=place,
                        what="operations",
                        policy=policy,
                        count=abs(now - then),
                        step=step,
                        message=message,
                    )
                )
        return differences
