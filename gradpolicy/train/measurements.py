"""Measures the effect of policies in an update: active entries, norms, counts of operations."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradpolicy.flow.install import Installed
from gradpolicy.freezing import Freezer
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.ages import Ages
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.tensors.sharding import local_shard
from gradpolicy.train.agreement import as_numbers, of_every_rank
from gradpolicy.train.ranks import is_first_copy

Measured = dict[str, dict[str, Any]]
"""The quantities of each policy. Those of a freeze policy are lists with one value per parameter."""

SUMS = ("entries", "active", "flipped", "state_bytes")
NORMS = ("weight_norm", "update_norm", "gradient_norm_before", "gradient_norm_after")


class Measurements:
    """Measures policies in selected updates, and counts the entries that flip in between.

    Args:
        freezer: The freezer of the freeze policies.
        installed: The flow policies.
    """

    def __init__(self, freezer: Freezer, installed: Installed) -> None:
        self._freezer, self._installed = freezer, installed
        self._active: dict[str, Ages] = {}
        # The entries that flipped since the last measurement.
        self._flips: dict[str, int | Tensor] = {}
        # Before the update that is measured: weights, and the norms of gradients by column and parameter.
        self._weights: dict[str, Tensor] = {}
        self._gradients: dict[str, dict[str, Tensor]] = {}
        # How many operations of each flow policy were counted when the update began.
        self._operations: Counter[str] | None = None
        self._restored: Counter[str] = Counter()
        freezer.observers.append(self)

    def remove(self) -> None:
        """Stop observing masks."""
        self._freezer.observers.remove(self)

    # ---- masks

    @torch.no_grad()
    def before_masks(self, names: Collection[str]) -> None:
        """Store which entries are active before new masks are set."""
        known = {parameter for each in self._freezer.optimizers for parameter in each.masked}
        for name in (name for name in names if self._freezer.parameters[name] in known):
            _, masked = self._find(name)
            if masked.mask_shape is not None and masked.ages.entries:
                self._active[name] = masked.ages

    @torch.no_grad()
    def after_masks(self, names: Collection[str]) -> None:
        """Count the entries that flipped."""
        for name in self._active.keys() & set(names):
            flips = self._find(name)[1].ages.flips(self._active.pop(name))
            self._flips[name] = self._flips.get(name, 0) + flips

    def state(self) -> dict[str, Any]:
        """Return the counts so far, for a checkpoint."""
        return {
            "flips": {name: int(n) for name, n in self._flips.items()},
            "operations": dict(self._met()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state`."""
        self._flips = {str(name): int(n) for name, n in state.get("flips", {}).items()}
        self._restored = Counter({str(name): int(n) for name, n in state.get("operations", {}).items()})

    # ---- the update that is measured

    def begin(self) -> None:
        """Start counting for an update."""
        self._operations = Counter(self._installed.operation_counts)
        self._operations.subtract(self._restored)
        self._weights, self._gradients, self._restored = {}, {}, Counter()

    def _met(self) -> Counter[str]:
        """Return the number of operations of each flow policy since an update that is measured began."""
        counts: Counter[str] = Counter()
        if self._operations is not None:
            counts.update(self._installed.operation_counts)
            counts.subtract(self._operations)
        return counts

    @torch.no_grad()
    def take_gradients(self, optimizer: torch.optim.Optimizer, column: str) -> None:
        """Measure the norms of gradients and copy the weights before an optimizer's update.

        Args:
            optimizer: The optimizer that is about to step.
            column: ``"gradient_norm_before"`` or ``"gradient_norm_after"`` the masks.
        """
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parameters = {name: p for name, p in self._freezer.parameters.items() if id(p) in optimized}
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        self._gradients.setdefault(column, {}).update(_norms(gradients))
        # Copied in one call. Parameters that are frozen completely do not change.
        moving = {
            name: local_shard(p)
            for name, p in parameters.items()
            if name not in self._weights and self._freezer.mask_of(name) is not False
        }
        copies = torch._foreach_mul(list(moving.values()), 1.0) if moving else ()
        self._weights |= dict(zip(moving, copies, strict=True))

    @torch.no_grad()
    def measure(self) -> Measured:
        """Return the measurements of an update; equal on all processes.

        Values of sharded parameters are summed over the processes. Norms of flow policies are those of the
        loss averaged over the processes.
        """
        found = tree_map_only(Tensor, Tensor.double, (self._measure_flow(), self._measure_freeze()))
        flow, rows = zip(*of_every_rank(as_numbers(found)), strict=True)
        return self._by_policy(_added(rows)) | _flow_quantities(flow)

    def _measure_flow(self) -> dict[str, dict[str, Any]]:
        """Return this process's counts, squared norms and zeros of each flow policy."""
        counts, self._operations = self._met(), None
        found: dict[str, dict[str, Any]] = {
            name: {"operations": counts[name], "active": self._installed.is_active(name)}
            for name in self._installed.operation_counts
        }
        for name, one in self._installed.gradient_norms.items():
            of_gradients = {"before": one.before, "after": one.after, "zeros": one.zeros}
            found[name] |= {**of_gradients, "entries": one.entries}
        return found

    def _measure_freeze(self) -> dict[str, dict[str, Any]]:
        """Return this process's values of each parameter of freeze policies, with squared norms.

        If several processes hold the same entries, only the first one returns values.
        """
        rows: dict[str, dict[str, Any]] = {}
        stored: dict[str, Tensor] = {}
        for name, parameter in self._freezer.parameters.items():
            if not is_first_copy(parameter):
                rows[name] = {}
                continue
            optimizer, masked = self._find(name)
            stored[name], parts = local_shard(parameter), 2 if parameter.is_complex() else 1
            rows[name] = {
                "entries": masked.ages.entries // parts,
                "active": masked.ages.active // parts,
                "flipped": int(self._flips.get(name, 0)) // parts,
                "state_bytes": optimizer.state_bytes(parameter),
                # Parameters that are frozen completely neither change nor have a gradient.
                "update_norm": 0.0,
                "gradient_norm_after": 0.0,
            }
        moved = {name: weight for name, weight in self._weights.items() if name in stored}
        norms = {"weight_norm": _norms({**stored, **moved})}
        if moved:
            torch._foreach_sub_(list(moved.values()), [stored[name] for name in moved])
        norms["update_norm"] = _norms(moved)
        for column, taken in self._gradients.items():
            norms[column] = {name: local_shard(norm) for name, norm in taken.items() if name in stored}
        for column, each in norms.items():
            for name, norm in each.items():
                rows[name][column] = norm.double() ** 2
        return rows

    def _by_policy(self, rows: Mapping[str, Mapping[str, Any]]) -> Measured:
        """Return the columns of each policy's parameters, and reset the counts."""
        self._flips, self._weights = {}, {}
        measured: Measured = {}
        for policy in self._freezer.policies:
            names = list(self._freezer.policies[policy].parameters)
            columns = {key: [rows[name].get(key) for name in names] for key in (*SUMS, *NORMS)}
            for key in NORMS:
                columns[key] = [None if square is None else math.sqrt(square) for square in columns[key]]
            measured[policy] = {"kind": "freeze", "parameter": names, **columns}
        return measured

    def _find(self, name: str) -> tuple[MaskedOptimizer, MaskedParameter]:
        """Return the first optimizer that has a mask of a parameter, and the parameter there."""
        parameter = self._freezer.parameters[name]
        optimizers = (each for each in self._freezer.optimizers if parameter in each.masked)
        return next((each, each.masked[parameter]) for each in optimizers)


def summary(measured: Measured) -> dict[str, float]:
    """Return one number for each quantity, as ``policy/<name>/<quantity>``.

    Example:
        >>> summary({"guided": {"kind": "flow", "active": True, "zeros_passed": None}})
        {'policy/guided/active': 1.0}
    """
    found: dict[str, float] = {}
    for policy, quantities in measured.items():
        totals = _totals(quantities) if quantities["kind"] == "freeze" else quantities
        numbers = {key: value for key, value in totals.items() if isinstance(value, int | float)}
        found |= {f"policy/{policy}/{key}": float(value) for key, value in numbers.items()}
    return found


def _totals(columns: Mapping[str, Sequence[Any]]) -> dict[str, float | None]:
    """Return the quantities of a freeze policy over all its parameters."""
    entries, norms = sum(columns["entries"]), {key: math.hypot(*filter(None, columns[key])) for key in NORMS}
    return {
        "active_share": sum(columns["active"]) / max(entries, 1),
        "flipped": sum(columns["flipped"]),
        "gradient_norm_before": norms["gradient_norm_before"],
        "gradient_norm_after": norms["gradient_norm_after"],
        "update_size": norms["update_norm"] / norms["weight_norm"] if norms["weight_norm"] else None,
        "optimizer_bytes": sum(columns["state_bytes"]),
    }


def _flow_quantities(of_ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> Measured:
    """Return the quantities of flow policies: counts of the first process, norms and zeros of all."""
    measured: Measured = {}
    for name, total in _added(of_ranks).items():
        first = of_ranks[0][name]
        norms = {key: math.sqrt(total[key]) / len(of_ranks) for key in ("before", "after") if key in total}
        measured[name] = {
            "kind": "flow",
            "operations": first["operations"],
            "gradient_norm_before": norms.get("before"),
            "gradient_norm_after": norms.get("after"),
            "zeros_passed": total["zeros"] / total["entries"] if total["entries"] else None,
            "active": bool(first["active"]),
        }
    return measured


def _added(of_ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Counter[str]]:
    """Return the sums over all processes."""
    added: dict[str, Counter[str]] = {name: Counter() for name in of_ranks[0]}
    for name, values in (pair for rank in of_ranks for pair in rank.items()):
        added[name].update(values)
    return added


def _norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    norms = torch._foreach_norm(list(tensors.values())) if tensors else ()
    return dict(zip(tensors, norms, strict=True))
