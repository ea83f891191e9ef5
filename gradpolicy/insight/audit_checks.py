"""The checks of the audit: frozen entries and stopped branches."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradpolicy.flow.containers import tensors_in
from gradpolicy.flow.install import Installed
from gradpolicy.freezing import Freezer
from gradpolicy.insight.run_files import AuditDifference
from gradpolicy.optim.layout import local_mask
from gradpolicy.optim.other_optimizers import entry_state
from gradpolicy.tensors.mask import as_tensor
from gradpolicy.tensors.seeded import derive
from gradpolicy.tensors.sharding import local_shard

# The number of indices in a difference.
INDICES = 10


@dataclass(frozen=True)
class Snapshot:
    """The bits of frozen entries of one parameter at the start of an interval.

    Attributes:
        step: The number of updates at that time.
        places: Flat indices of the entries within this process's part of the parameter.
        bits: The bytes of each entry, by ``"weight"`` or ``"state <name>"``.
    """

    step: int
    places: Tensor
    bits: dict[str, Tensor]


class FrozenEntries:
    """Checks that frozen entries keep their bits: weights, and state under ``frozen_state="keep"``.

    An interval starts with a snapshot. It ends when the mask changes, when the next snapshot is due, when a
    checkpoint is saved and when training ends.

    Args:
        freezer: The freezer, which sets the masks.
        entries: The number of random entries of each tensor that are compared. None means all entries, also
            after each change of masks; the snapshots are then in the host's memory.
        every: A snapshot is due at multiples of this number of updates, and after the first one, which
            creates the optimizer's state.
        seed: The seed of the random entries.
        report: A function that receives differences found during training.
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
        """Start intervals under new masks."""
        if self._entries is None:
            self._take_snapshots(names)
        self.renew()

    def renew(self, *, now: bool = False) -> None:
        """End all intervals and start new ones, if that is due or wanted `now`."""
        if self.updates < self._next_snapshot and not now:
            return
        self._next_snapshot = (self.updates // self._every + 1) * self._every if self.updates else 1
        self._report(self.compare())
        self._take_snapshots(self._freezer.parameters)

    def compare(self) -> list[AuditDifference]:
        """End all intervals."""
        return self._compare(self._snapshots)

    def continue_from_checkpoint(self) -> None:
        """Start new intervals, as a run resumed from this checkpoint does."""
        self._next_snapshot = self.updates
        self._take_snapshots([*self._snapshots])

    def detach(self) -> None:
        """Stop observing the freezer."""
        self._freezer.observers.remove(self)

    @property
    def updates(self) -> int:
        """The number of updates."""
        optimizers: list[Any] = self._freezer.optimizers
        return max(each.effective_steps for each in optimizers)

    @torch.no_grad()
    def _compare(self, snapshots: Mapping[str, Snapshot]) -> list[AuditDifference]:
        differences = []
        for name, before in snapshots.items():
            now = self._bits(name, before.places)
            found = []
            for what, bits in before.bits.items():
                # Missing state counts as changed.
                changed = bits.new_ones(len(bits), dtype=torch.bool)
                if what in now:
                    changed = (now[what].to(bits.device) != bits).any(1)
                if changed.any():
                    found.append(self._difference(name, what, before, changed.cpu()))
            # There is no interval if masks are set twice between two updates.
            if found or self.updates > before.step:
                self.intervals += 1
                self.compared += len(before.places) * len(before.bits)
            self.changed += sum(each.count for each in found)
            differences += found
        return differences

    def _difference(self, name: str, what: str, before: Snapshot, changed: Tensor) -> AuditDifference:
        policies = [each for each in self._freezer.policies if name in self._freezer.parameters_of(each)]
        count, places = int(changed.sum()), before.places.cpu()[changed][:INDICES]
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
            return torch.empty(0, dtype=torch.int64, device=own.device)
        if self._entries is None or own.numel() <= self._entries:
            places = torch.arange(own.numel(), device=own.device)
        else:
            # One entry in each of this number of equal parts of the tensor.
            generator = torch.Generator("cpu").manual_seed(derive("audit", self._seed, name, self.updates))
            starts = torch.arange(self._entries + 1, device="cpu") * own.numel() // self._entries
            offsets = torch.rand(self._entries, generator=generator, dtype=torch.float64, device="cpu")
            places = (starts[:-1] + (offsets * starts.diff()).long()).to(own.device)
        if mask is False:
            return places
        active = as_tensor(mask, parameter.shape, own.device)
        active = local_mask(active.reshape((1,) * (own.dim() - active.dim()) + active.shape), parameter)
        return places[~active.expand(own.shape).reshape(-1)[places]]

    def _bits(self, name: str, places: Tensor) -> dict[str, Tensor]:
        """Return the bytes of entries of the weight, and of state that is kept while frozen."""
        parameter = self._freezer.parameters[name]
        tensors = {"weight": parameter.detach()}
        for optimizer in self._freezer.optimizers:
            # Under ZeRO the state is in the local optimizer of one rank.
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
    # Lightning has moved the model to the CPU when a fit ends.
    return tensor.detach().reshape(-1)[places.to(tensor.device)].view(torch.uint8).view(len(places), -1)


class StoppedBranches:
    """Checks that gradients stopped by :class:`gradpolicy.Stop` are exactly zero, except in compiled code.

    The tensor after a cut in the graph must not require a gradient, the gradient passed on under
    ``mode="zero"`` must be zero, and parameters that are stopped (``params=``) must have no gradient, or
    zeros.

    Args:
        installed: The flow policies.
        stops: The names of the policies that stop.
        named: The model's parameters by name.

    Attributes:
        counts: The number of checks, and of those that found a gradient that was not zero.
    """

    def __init__(self, installed: Installed, stops: Iterable[str], named: Mapping[str, Tensor]) -> None:
        self.counts = {"checked": 0, "nonzero": 0}
        self._checking = False
        # In this batch: the policy, the place, and the number of wrong entries or tensors.
        self._found: list[tuple[str, str, int | Tensor]] = []
        rows = {row.name: row for row in installed.report().rows}
        self._parameters = [
            (policy, name, named[name]) for policy in stops for name in rows[policy].parameters
        ]
        for policy in stops:
            installed.observe(policy, self)

    def begin(self) -> None:
        """Start checking a batch."""
        self._checking = True
        self._found.clear()

    def cut(self, policy: str, location: str, results: Any) -> None:
        """Check the tensor after a cut."""
        if self._checking:
            self._found.append((policy, location, sum(each.requires_grad for each in tensors_in(results))))

    def passed(self, policy: str, gradients: Iterable[Tensor | None]) -> None:
        """Check gradients that were passed on."""
        if self._checking:
            place = "the gradient that it lets through"
            self._found += [(policy, place, each.count_nonzero()) for each in gradients if each is not None]

    def end(self, step: int, active: Collection[str]) -> list[AuditDifference]:
        """Check stopped gradients after an update.

        Args:
            step: The number of updates so far.
            active: The active policies, if the parameters still have their gradients.
        """
        self._checking = False
        for policy, name, parameter in self._parameters:
            if policy in active:
                gradient = parameter.grad
                wrong = 0 if gradient is None else local_shard(gradient).count_nonzero()
                self._found.append((policy, name, wrong))
        differences = [
            AuditDifference(
                tensor=place,
                what="gradient",
                policy=policy,
                count=count,
                step=step,
                message=f"policy.{policy}: {place} is stopped, and got a gradient that is not zero in "
                f"{count} entries in update {step}",
            )
            for policy, place, wrong in self._found
            if (count := int(wrong))
        ]
        self.counts["checked"] += len(self._found)
        self.counts["nonzero"] += len(differences)
        return differences
