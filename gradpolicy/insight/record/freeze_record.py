"""What the record says of freeze policies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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


class FreezeRecord:
    """Follows the masks of a fit, and measures updates. An observer of the :class:`~gradpolicy.Freezer`.

    Args:
        policies: The callback that runs the policies.
        changes: What `state` gave.
    """

    def __init__(self, policies: GradientPolicies, changes: Mapping[str, Any] | None = None) -> None:
        assert policies.freezer is not None
        self._policies = policies
        self._freezer = policies.freezer
        self._found: dict[str, tuple[MaskedOptimizer, MaskedParameter]] = {}
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
            known = self._find(name)
            if known is None or known[1].mask_shape is None:
                self._first.add(name)
            elif known[1].layout.size:
                self._flags[name] = active_flags(known[1])

    @torch.no_grad()
    def after_masks(self, names: Collection[str]) -> None:
        """Counts the entries that flipped."""
        for name in names:
            flips: int | Tensor = 0
            if name in self._flags:
                flips = flipped_entries(self._flags.pop(name), active_flags(self._masked(name)))
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
            self._weights = {
                name: local_shard(parameter.detach()).clone()
                for name, parameter in self._freezer.parameters.items()
                if not self._masked(name).frozen_everywhere
            }

    @torch.no_grad()
    def take(self, *, measured: bool) -> dict[str, Any]:
        """What this process knows of an update, and what changed before it; the next begins.

        What lies on a device stays there until `read`.

        Args:
            measured: Of all parameters, with what `keep_weights` and the policies' norms tell; otherwise
                counts in the layers where masks were set.
        """
        parameters = self._freezer.parameters
        layers = {layer_of(name) for name in self._flips}
        names = [name for name in parameters if measured or layer_of(name) in layers]
        alone = not dist.is_initialized()
        own = {name: alone or _is_first_replica(parameters[name]) for name in names}
        taken: dict[str, Any] = {
            "names": names,
            "first": self._first,
            "counts": self._counts(own),
            "flips": {name: self._flips.get(name, 0) for name in names if own[name]},
        }
        if measured:
            held = ((self._masked(name), _real_size(parameters[name])) for name in names if own[name])
            taken |= {"norms": self._norms(own), "ages": AgeSample.of(held)}
        self._flips, self._first, self._weights = {}, set(), {}
        return taken

    def _counts(self, own: Mapping[str, bool]) -> Columns:
        """Entries, active ones and bytes; of what another process tells too, only bytes that it lacks."""
        columns: Columns = {"entries": [], "active": [], "state_bytes": []}
        for name, mine in own.items():
            parameter = self._freezer.parameters[name]
            optimizer, masked = self._known(name)
            parts = _real_parts(parameter)
            counts = mine or isinstance(optimizer, MaskedZero)
            columns["entries"].append(masked.layout.size // parts if mine else 0)
            columns["active"].append(masked.active_entries // parts if mine else 0)
            columns["state_bytes"].append(optimizer.state_bytes(parameter) if counts else 0)
        return columns

    def _norms(self, own: Mapping[str, bool]) -> dict[str, dict[str, Tensor]]:
        """The norms of weights before the update, of their change, and of gradients."""
        parameters = self._freezer.parameters
        now = {name: local_shard(parameters[name].detach()) for name, mine in own.items() if mine}
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
        names, parameters = taken["names"], self._freezer.parameters
        flips = dict(zip(taken["flips"], numbers(list(taken["flips"].values())), strict=True))
        columns: Columns = {
            "parameter": names,
            **taken["counts"],
            "flipped": [int(flips.get(name, 0)) // _real_parts(parameters[name]) for name in names],
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
        columns["frozen_state"] = [self._masked(name).frozen_state for name in names]
        measured = "ages" in columns
        if measured:
            columns |= {column: roots(columns[column]) for column in MEASURED}
            columns |= age_quartiles(columns.pop("ages"))
        layers = {layer_of(name) for name, changed in zip(names, columns["changed"], strict=True) if changed}
        for policy in self._freezer.policies:
            own = self._freezer.parameters_of(policy)
            places = [
                place
                for place, name in enumerate(names)
                if name in own and (measured or layer_of(name) in layers)
            ]
            if places:
                chosen = {column: [values[place] for place in places] for column, values in columns.items()}
                yield {"kind": "freeze", "policy": policy, **chosen}

    # ---- where things are

    def _find(self, name: str) -> tuple[MaskedOptimizer, MaskedParameter] | None:
        """The first optimizer that knows a mask of a parameter, and what it knows."""
        if name not in self._found:
            parameter = self._freezer.parameters[name]
            for optimizer in self._policies.masked_optimizers:
                if parameter in optimizer.masked_parameters():
                    self._found[name] = optimizer, optimizer.masked_parameters()[parameter]
                    break
        return self._found.get(name)

    def _known(self, name: str) -> tuple[MaskedOptimizer, MaskedParameter]:
        found = self._find(name)
        assert found is not None, "masks are set before the first update"
        return found

    def _masked(self, name: str) -> MaskedParameter:
        return self._known(name)[1]


_NO_AGES = np.empty(0, np.int64)


def layer_of(parameter: str) -> str:
    """The name of the module that holds a parameter."""
    return parameter.rpartition(".")[0]


def _norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    norms = torch._foreach_norm(list(tensors.values())) if tensors else ()
    return dict(zip(tensors, norms, strict=True))


def _real_parts(parameter: Tensor) -> int:
    """How many numbers an entry is to the optimizer, which updates real and imaginary parts alone."""
    return 2 if parameter.is_complex() else 1


def _real_size(parameter: Tensor) -> int:
    return parameter.numel() * _real_parts(parameter)


def _is_first_replica(parameter: Tensor) -> bool:
    """Whether this process is the first of those that hold the same entries."""
    if not is_sharded(parameter):
        return dist.get_rank() == 0
    sharded: Any = parameter
    places = zip(sharded.placements, sharded.device_mesh.get_coordinate() or (), strict=False)
    return all(place == 0 for placement, place in places if placement.is_replicate())
