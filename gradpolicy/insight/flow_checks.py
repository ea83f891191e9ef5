"""Checks in training that stopped branches get no gradient, and that policies meet the same every batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradpolicy.flow.containers import tensors_in
from gradpolicy.flow.install import Installed
from gradpolicy.tensors.sharding import local_shard


@dataclass(frozen=True)
class FlowDifference:
    """What a flow policy did not do as it should.

    Attributes:
        tensor: The parameter or place.
        what: ``"gradient"`` or ``"operations"``.
        policies: The policy.
        count: How many entries of the gradient were not zero; how many calls there were too many or too few.
        step: Updates when it was found.
        text: The same for a person to read.
    """

    tensor: str
    what: str
    policies: tuple[str, ...]
    count: int
    step: int
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Checked:
    """How often something was looked at, and how often it was not as it should be."""

    checked: int = 0
    wrong: int = 0


class StoppedBranches:
    """Checks that what :class:`gradpolicy.Stop` stops receives exactly zero.

    - Where the graph is cut, that what leaves the cut has no graph.
    - A parameter from which in the first look all ways to the loss lead through cuts has no gradient. The
      graph behind each cut is walked once to find them.
    - Where zeros are passed on (``mode="zero"``), that they are zeros.
    - Parameters that are stopped themselves (``params=``) have a gradient of zeros or none.

    Args:
        installed: The flow policies.
        stops: The names of those that stop.
        named: The model's parameters by name.
    """

    def __init__(self, installed: Installed, stops: Iterable[str], named: Mapping[str, Tensor]) -> None:
        self.counts = Checked()
        self._named = named
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._looks = False
        # Of this batch: the policy, the place, and how many entries or tensors are not as they should be.
        self._seen: list[tuple[str, str, int | Tensor]] = []
        self._walked: set[tuple[str, str]] = set()
        # Parameters behind the cuts of a policy, until an update tells which of them have no other way.
        self._behind: dict[str, set[str]] = {}
        # Parameters that must have no gradient: the policy, and those that must hold for it to be so.
        self._stopped: dict[str, tuple[str, frozenset[str]]] = {}
        rows = {row.name: row for row in installed.report().rows}
        for policy in stops:
            installed.observe(policy, self)
            self._stopped |= {name: (policy, frozenset([policy])) for name in rows[policy].parameters}

    def begin_batch(self) -> None:
        """Looks at gradients from now on, until an update."""
        self._looks = True
        self._seen.clear()

    def cut(self, policy: str, location: str, tensors: Iterable[Tensor], results: Any) -> None:
        """Looks at a cut, and notes the parameters behind it."""
        if self._looks:
            self._seen.append((policy, location, sum(each.requires_grad for each in tensors_in(results))))
        if (policy, location) not in self._walked:
            self._walked.add((policy, location))
            found = {self._names[key] for key in leaves_behind(tensors) if key in self._names}
            self._behind.setdefault(policy, set()).update(found)

    def passed(self, policy: str, gradients: Iterable[Tensor | None]) -> None:
        """Looks at a gradient that was let through."""
        if self._looks:
            for gradient in gradients:
                if gradient is not None:
                    self._seen.append((policy, "the gradient that it lets through", gradient.count_nonzero()))

    def end_update(
        self, step: int, active: Iterable[str], frozen: Callable[[], set[str]]
    ) -> list[FlowDifference]:
        """Looks at gradients after an update.

        Args:
            step: Updates taken so far.
            active: The flow policies that hold in this step, whose parameters still have their gradients.
            frozen: Gives the parameters that have no gradient for another reason.

        Returns:
            What was not zero.
        """
        found, self._seen = self._seen, []
        holding = frozenset(active)
        for policy in holding & self._behind.keys():
            trains = {n for n in self._behind[policy] - frozen() if self._named[n].requires_grad}
            self._behind[policy] -= trains
            without = [name for name in sorted(trains) if self._named[name].grad is None]
            self._stopped |= {name: (policy, holding) for name in without if name not in self._stopped}
            if not self._behind[policy]:
                del self._behind[policy]
        for name, (policy, needed) in self._stopped.items():
            if needed <= holding:
                gradient = self._named[name].grad
                found.append((policy, name, 0 if gradient is None else local_shard(gradient).count_nonzero()))
        self._looks = False
        return [
            FlowDifference(
                tensor=place,
                what="gradient",
                policies=(policy,),
                count=number,
                step=step,
                text=f"policy.{policy}: {place} is stopped, and got a gradient that is not zero in {number} "
                f"entries in update {step}",
            )
            for policy, place, number in self._read(found)
            if number
        ]

    def _read(self, found: list[tuple[str, str, int | Tensor]]) -> Iterator[tuple[str, str, int]]:
        self.counts.checked += len(found)
        for policy, place, number in found:
            whole = int(number)
            self.counts.wrong += bool(whole)
            yield policy, place, whole


def leaves_behind(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of the leaf tensors that the graph of some tensors leads to."""
    tensors = list(tensors)
    found = {id(tensor) for tensor in tensors if tensor.is_leaf and tensor.requires_grad}
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        following = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= following
        waiting += following
    return found


class MetOperations:
    """Checks that each policy meets the same operations and passes the same places in every batch.

    The first batch in which a policy holds says what is the same. Those met in compiled code are left out.

    Args:
        installed: The flow policies.
    """

    def __init__(self, installed: Installed) -> None:
        self.counts = Checked()
        self._installed = installed
        self._before: dict[str, dict[str, int]] = {}
        self._after: dict[str, dict[str, int]] = {}
        self._usual: dict[str, dict[str, int]] = {}

    def begin_batch(self) -> None:
        """Notes the counts before a batch."""
        self._before = self._installed.met()
        self._after = {}

    def end_backward(self) -> None:
        """Notes the counts after a backward pass of the batch."""
        self._after = self._installed.met()

    def end_batch(self, step: int, active: Iterable[str]) -> list[FlowDifference]:
        """Compares a batch with the first.

        Args:
            step: Updates taken so far.
            active: The policies that hold in this batch.

        Returns:
            What was met more or less often.
        """
        differences = []
        for policy in active:
            if policy not in self._before or policy not in self._after:
                continue
            before, after = self._before[policy], self._after[policy]
            met = {place: n - before.get(place, 0) for place, n in after.items() if n > before.get(place, 0)}
            usual = self._usual.setdefault(policy, met)
            self.counts.checked += 1
            if met != usual:
                self.counts.wrong += 1
                place = next(each for each in (*usual, *met) if met.get(each) != usual.get(each))
                now, once = met.get(place, 0), usual.get(place, 0)
                differences.append(
                    FlowDifference(
                        tensor=place,
                        what="operations",
                        policies=(policy,),
                        count=abs(now - once),
                        step=step,
                        text=f"policy.{policy}: {place} was met {now} times in the batch before update "
                        f"{step + 1}, and {once} times in the first; where the forward pass differs from "
                        "batch to batch on purpose, set callbacks.audit.operations=false",
                    )
                )
        return differences
