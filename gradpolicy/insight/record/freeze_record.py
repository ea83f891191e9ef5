"""What the record says of freeze policies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradpolicy.insight.record.columns import (
    AgeSample,
    Columns,
    Flags,
    active_flags,
    added,
    age_quartiles,
    flipped_entries,
    numbers,
    roots,
)
from gradpolicy.lightning.callback import GradientPolicies
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.zero_redundancy import MaskedZero
from gradpolicy.tensors.sharding import is_sharded, local_shard

MEASURED = ("weight_norm", "update_norm", "gradient_norm_before", "gradient_norm_after")


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter of freeze policies, and where what is known of it lies.

    Attributes:
        name, parameter: The parameter.
        layer: The name of the module that holds it.
        optimizer: The first optimizer that knows a mask of it.
        masked: What that knows.
        parts: How many numbers an entry is: the optimizer updates real and imaginary parts each alone.
        is_sharded: Whether several processes hold parts of it.
        is_told: Whether this process tells what it holds; otherwise another one that holds the same does.
        adds_bytes: Whether its optimizer state is not what that other one holds.
    """

    name: str
    parameter: Tensor
    layer: str
    optimizer: MaskedOptimizer
    masked: MaskedParameter
    parts: int
    is_sharded: bool
    is_told: bool
    adds_bytes: bool

    @classmethod
    def of(cls, name: str, parameter: Tensor, optimizer: MaskedOptimizer) -> Place:
        """Finds it out."""
        told = _is_first_replica(parameter)
        return cls(
            name,
            parameter,
            layer_of(name),
            optimizer,
            optimizer.masked_parameters()[parameter],
            2 if parameter.is_complex() else 1,
            is_sharded(parameter),
            told,
            told or isinstance(optimizer, MaskedZero),
        )

    @property
    def held(self) -> Tensor:
        """The entries that this process holds."""
        return local_shard(self.parameter) if self.is_sharded else self.parameter


class FreezeRecord:
    """Follows the masks of a fit, and measures updates; one of the freezer's observers.

    Args:
        policies: The callback that runs the policies.
        changes: What `state` gave.
    """

    def __init__(self, policies: GradientPolicies, changes: Mapping[str, Any] | None = None) -> None:
        assert policies.freezer is not None
        self._policies = policies
        self._freezer = policies.freezer
        self._places: dict[str, Place] = {}
        self._flags: dict[str, Flags] = {}
        self._weights: dict[str, Tensor] = {}
        # What was set since the last update, with the entries that flipped; and what had no mask before.
        self._flips: dict[str, int | Tensor] = {}
        self._first: set[str] = set()
        if changes:
            self._flips = dict(changes["flips"])
            self._first = set(changes["first"])

    def remove(self) -> None:
        """Stops following the masks."""
        self._freezer.observers.remove(self)

    # ---- changes of masks

    @torch.no_grad()
    def before_masks(self, names: Collection[str]) -> None:
        """Keeps which entries trained so far."""
        for name in names:
            place = self._find(name)
            if place is None or place.masked.mask_shape is None:
                self._first.add(name)
            elif place.masked.layout.size:
                self._flags[name] = active_flags(place.masked)

    @torch.no_grad()
    def after_masks(self, names: Collection[str]) -> None:
        """Counts the entries that flipped."""
        for name in names:
            flips: int | Tensor = 0
            if name in self._flags:
                flips = flipped_entries(self._flags.pop(name), active_flags(self._place(name).masked))
            self._flips[name] = self._flips.get(name, 0) + flips

    @property
    def has_changes(self) -> bool:
        """Whether masks were set since the last update; the same on all processes."""
        return bool(self._flips)

    def state(self) -> dict[str, Any]:
        """The changes that no row tells yet, as within a window of accumulated batches."""
        return {
            "flips": {name: int(count) for name, count in self._flips.items()},
            "first": sorted(self._first),
        }

    # ---- updates

    @torch.no_grad()
    def keep_weights(self) -> None:
        """Keeps the weights until `take`. Those of parameters that are frozen as a whole will not change."""
        if not self._weights:
            places = map(self._place, self._freezer.parameters)
            moving = {place.name: place.held for place in places if not place.masked.frozen_everywhere}
            # One call for all copies.
            copies = torch._foreach_mul(list(moving.values()), 1.0) if moving else ()
            self._weights = dict(zip(moving, copies, strict=True))

    @torch.no_grad()
    def take(self, *, measured: bool) -> dict[str, Any]:
        """What this process knows of an update, and what changed before it; the next begins.

        What lies on a device stays there until `read`.

        Args:
            measured: Of all parameters, with what `keep_weights` and the policies' norms tell; otherwise
                counts in the layers where masks were set.
        """
        places = [self._place(name) for name in self._freezer.parameters]
        if not measured:
            layers = {layer_of(name) for name in self._flips}
            places = [place for place in places if place.layer in layers]
        told = [place for place in places if place.is_told]
        taken: dict[str, Any] = {
            "first": self._first,
            "counts": {
                "parameter": [place.name for place in places],
                "entries": [
                    place.masked.layout.size // place.parts if place.is_told else 0 for place in places
                ],
                "active": [
                    place.masked.ages.active // place.parts if place.is_told else 0 for place in places
                ],
                "state_bytes": [
                    place.optimizer.state_bytes(place.parameter) if place.adds_bytes else 0
                    for place in places
                ],
            },
            "flips": {place.name: self._flips.get(place.name, 0) for place in told},
        }
        if measured:
            sizes = ((place.masked, place.parameter.numel() * place.parts) for place in told)
            taken |= {"norms": self._norms(told), "ages": AgeSample.of(sizes)}
        self._flips, self._first, self._weights = {}, set(), {}
        return taken

    def _norms(self, told: Iterable[Place]) -> dict[str, dict[str, Tensor]]:
        """The norms of weights before the update, of their change, and of gradients."""
        now = {place.name: place.held for place in told}
        old = {name: weight for name, weight in self._weights.items() if name in now}
        found = {"weight_norm": _norms({**now, **old})}
        if old:
            torch._foreach_sub_(list(old.values()), [now[name] for name in old])
        found["update_norm"] = _norms(old)
        gradients = (self._policies.norms_before, self._policies.norms_after)
        for column, norms in zip(MEASURED[2:], gradients, strict=True):
            found[column] = {name: local_shard(norms[name]) for name in now if name in norms}
        return found

    def read(self, taken: Mapping[str, Any]) -> Columns:
        """The columns of what `take` gave."""
        names = taken["counts"]["parameter"]
        flips = dict(zip(taken["flips"], numbers(list(taken["flips"].values())), strict=True))
        columns: Columns = {
            **taken["counts"],
            "flipped": [int(flips.get(name, 0)) // self._place(name).parts for name in names],
        }
        if "norms" in taken:
            values = iter(numbers([norm for norms in taken["norms"].values() for norm in norms.values()]))
            squares = {
                column: {name: next(values) ** 2 for name in norms}
                for column, norms in taken["norms"].items()
            }
            for column in ("update_norm", "gradient_norm_after"):
                # What is frozen as a whole neither moves nor keeps a gradient.
                squares[column] = {**dict.fromkeys(taken["flips"], 0.0), **squares[column]}
            columns |= {column: [found.get(name) for name in names] for column, found in squares.items()}
            ages = dict(zip(taken["flips"], taken["ages"].read(), strict=True))
            columns["ages"] = [ages.get(name, _NO_AGES) for name in names]
        return columns

    # ---- rows

    def rows(self, of_ranks: Sequence[Columns], first: Collection[str]) -> Iterator[dict[str, Any]]:
        """A row for each policy, of lists with a value for each parameter.

        Args:
            of_ranks: What `read` gave on each process that knows something of its own.
            first: The parameters that had no mask before.
        """
        names, columns = of_ranks[0]["parameter"], added(of_ranks)
        flipped = zip(names, columns["flipped"], strict=True)
        columns["changed"] = [name in first or count > 0 for name, count in flipped]
        columns["frozen_state"] = [self._place(name).masked.options.frozen_state for name in names]
        measured = "ages" in columns
        if measured:
            columns |= {column: roots(columns[column]) for column in MEASURED}
            columns |= age_quartiles(columns.pop("ages"))
        changed = {name for name, changes in zip(names, columns["changed"], strict=True) if changes}
        layers = {self._place(name).layer for name in (names if measured else changed)}
        for policy in self._freezer.policies:
            own = self._freezer.parameters_of(policy)
            places = [
                place for place, name in enumerate(names) if name in own and self._place(name).layer in layers
            ]
            if places:
                chosen = columns
                if len(places) < len(names):
                    chosen = {key: [values[place] for place in places] for key, values in columns.items()}
                yield {"kind": "freeze", "policy": policy, **chosen}

    # ---- where things are

    def _find(self, name: str) -> Place | None:
        """Where a parameter is known; None if it never had a mask."""
        if name not in self._places:
            parameter = self._freezer.parameters[name]
            for optimizer in self._policies.masked_optimizers:
                if parameter in optimizer.masked_parameters():
                    self._places[name] = Place.of(name, parameter, optimizer)
                    break
        return self._places.get(name)

    def _place(self, name: str) -> Place:
        place = self._places.get(name) or self._find(name)
        assert place is not None, "masks are set before the first update"
        return place


_NO_AGES = np.empty(0, np.int64)


def layer_of(parameter: str) -> str:
    """The name of the module that holds a parameter."""
    return parameter.rpartition(".")[0]


def _norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    norms = torch._foreach_norm(list(tensors.values())) if tensors else ()
    return dict(zip(tensors, norms, strict=True))


def _is_first_replica(parameter: Tensor) -> bool:
    """Whether this process is the first of those that hold the same entries."""
    if not dist.is_initialized():
        return True
    if not is_sharded(parameter):
        return dist.get_rank() == 0
    sharded: Any = parameter
    places = zip(sharded.placements, sharded.device_mesh.get_coordinate() or (), strict=False)
    return all(place == 0 for placement, place in places if placement.is_replicate())
