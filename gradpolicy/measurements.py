"""Measures what policies do in an update, as one mapping."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradpolicy.flow.install import Installed
from gradpolicy.freezing import Freezer
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.zero_redundancy import MaskedZero
from gradpolicy.tensors.sharding import is_sharded, local_shard

Measured = dict[str, dict[str, Any]]
"""By policy: its quantities. Those of a freeze policy are lists, with a value for each parameter."""

SAMPLE = 4096
"""From how many entries of a parameter, at most, the quartiles of its ages are taken."""
NORMS = ("weight_norm", "update_norm", "gradient_norm_before", "gradient_norm_after")
AGES = ("age_min", "age_q25", "age_median", "age_q75", "age_max")

Flags = tuple[Tensor, int]
"""Whether each block of consecutive entries is active, and how many entries are in a block."""


class Measurements:
    """Measures policies in the updates that are asked for; counts the entries that flip in between.

    Args:
        freezer: Runs the freeze policies, if there are any. Its masks are observed.
        installed: The flow policies, if there are any.
    """

    def __init__(self, freezer: Freezer | None, installed: Installed | None) -> None:
        self._freezer, self._installed = freezer, installed
        self._active: dict[str, Flags] = {}
        # Since the last measurement: entries that flipped, and parameters that got their first mask.
        self._flips: dict[str, int | Tensor] = {}
        self._first: set[str] = set()
        # Before the update that is measured: weights, and the norms of gradients by column and parameter.
        self._weights: dict[str, Tensor] = {}
        self._gradients: dict[str, dict[str, Tensor]] = {}
        # By phase: how often each flow policy had been met when it began.
        self._operations: dict[str, Counter[str]] = {}
        self._restored: Counter[str] = Counter()
        if freezer is not None:
            freezer.observers.append(self)

    def detach(self) -> None:
        """Stop observing masks."""
        if self._freezer is not None:
            self._freezer.observers.remove(self)

    # ---- masks

    @torch.no_grad()
    def before_masks(self, names: Collection[str]) -> None:
        """Keep which entries trained so far."""
        for name in names:
            _, masked = self._find(name)
            if masked is None or masked.mask_shape is None:
                self._first.add(name)
            elif masked.layout.size:
                self._active[name] = active_flags(masked)

    @torch.no_grad()
    def after_masks(self, names: Collection[str]) -> None:
        """Count the entries that flipped."""
        for name in names:
            _, masked = self._find(name)
            before = self._active.pop(name, None)
            if before is not None and masked is not None:
                flips = flipped_entries(before, active_flags(masked))
                self._flips[name] = self._flips.get(name, 0) + flips

    def state(self) -> dict[str, Any]:
        """Return what was counted so far, for a checkpoint that may be saved within an update."""
        return {
            "flips": {name: int(n) for name, n in self._flips.items()},
            "first": sorted(self._first),
            "operations": dict(self._met("fit")) if "fit" in self._operations else {},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._flips = {str(name): int(n) for name, n in state.get("flips", {}).items()}
        self._first = set(map(str, state.get("first", ())))
        self._restored = Counter({str(name): int(n) for name, n in state.get("operations", {}).items()})

    # ---- the update that is measured

    def begin(self, phase: str = "fit") -> None:
        """Begin an update, or the evaluation of a phase."""
        if self._installed is not None:
            self._operations[phase] = Counter(self._installed.operation_counts)
        if phase == "fit":
            self._operations.setdefault(phase, Counter()).subtract(self._restored)
            self._weights, self._gradients, self._restored = {}, {}, Counter()

    def _met(self, phase: str) -> Counter[str]:
        """Return how often each flow policy was met since a phase began."""
        counts = Counter(self._installed.operation_counts if self._installed is not None else {})
        counts.subtract(self._operations[phase])
        return counts

    @torch.no_grad()
    def take_gradients(self, optimizer: torch.optim.Optimizer, column: str) -> None:
        """Take the norms of gradients, and keep the weights, before an optimizer's update.

        Args:
            optimizer: The one that is about to step.
            column: ``"gradient_norm_before"`` or ``"gradient_norm_after"`` the masks.
        """
        if self._freezer is None:
            return
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parameters = {name: p for name, p in self._freezer.parameters.items() if id(p) in own}
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        self._gradients.setdefault(column, {}).update(_norms(gradients))
        # Copied in one call. What is frozen as a whole will not move.
        moving = {
            name: local_shard(p)
            for name, p in parameters.items()
            if name not in self._weights and self._freezer.mask_of(name) is not False
        }
        copies = torch._foreach_mul(list(moving.values()), 1.0) if moving else ()
        self._weights |= dict(zip(moving, copies, strict=True))

    @torch.no_grad()
    def measure(self, phase: str = "fit") -> Measured:
        """Return what policies did in an update, or in the evaluation of a phase, the same on all processes.

        Of shards the processes add up what they hold. Norms of flow policies are those of the loss averaged
        over the processes.
        """
        flow, freeze = self._measure_flow(phase), self._measure_freeze() if phase == "fit" else {}
        if dist.is_initialized() and dist.get_world_size() > 1:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, (flow, freeze))
        else:
            parts = [(flow, freeze)]
        measured = self._by_policy(_freeze_quantities([part[1] for part in parts])) if freeze else {}
        return measured | _flow_quantities([part[0] for part in parts], phase)

    def _measure_flow(self, phase: str) -> dict[str, dict[str, float]]:
        """Return this process's counts, squared norms and zeros of each flow policy."""
        if self._installed is None:
            return {}
        counts = self._met(phase)
        del self._operations[phase]
        # What an evaluation within an update met does not belong to the update.
        for other in self._operations.values():
            other.update(counts)
        found: dict[str, dict[str, float]] = {
            name: {"operations": counts[name], "active": self._installed.is_active(name)}
            for name in self._installed.operation_counts
        }
        norms, zeros = self._installed.gradient_norms, self._installed.zeros_passed
        values = iter(_numbers([norm for pair in norms.values() for norm in pair]))
        for name in norms:
            found[name] |= {"before": next(values) ** 2, "after": next(values) ** 2}
        for (name, (_, entries)), count in zip(
            zeros.items(), _numbers([n for n, _ in zeros.values()]), strict=True
        ):
            found[name] |= {"zeros": count, "entries": entries}
        return found

    def _measure_freeze(self) -> dict[str, list[Any]]:
        """Return what this process holds of all parameters of freeze policies, by column; norms squared.

        Of processes that hold the same entries, the first alone has values; the others have 0 or None.
        """
        if self._freezer is None:
            return {}
        columns: dict[str, list[Any]] = {"parameter": list(self._freezer.parameters)}
        held = {}
        for name, parameter in self._freezer.parameters.items():
            optimizer, masked = self._find(name)
            assert optimizer is not None
            assert masked is not None
            is_first, parts = _is_first_replica(parameter), 2 if parameter.is_complex() else 1
            own: dict[str, Any] = {
                "entries": masked.layout.size // parts,
                "active": masked.ages.active // parts,
                "flipped": int(self._flips.get(name, 0)) // parts,
                "ages": sampled_ages(masked, parameter.numel() * parts),
                "state_bytes": optimizer.state_bytes(parameter),
            }
            if is_first:
                held[name] = local_shard(parameter)
            else:
                # Another process has the same; under ZeRO not the same state.
                bytes_held = own["state_bytes"] if isinstance(optimizer, MaskedZero) else 0
                own = {**dict.fromkeys(own, 0), "ages": own["ages"][:0], "state_bytes": bytes_held}
            for key, value in own.items():
                columns.setdefault(key, []).append(value)
        moved = {name: weight for name, weight in self._weights.items() if name in held}
        norms = {"weight_norm": _norms({**held, **moved})}
        if moved:
            torch._foreach_sub_(list(moved.values()), [held[name] for name in moved])
        norms["update_norm"] = _norms(moved)
        for column in NORMS[2:]:
            taken = self._gradients.get(column, {})
            norms[column] = {name: local_shard(taken[name]) for name in held if name in taken}
        values = iter(_numbers([norm for each in norms.values() for norm in each.values()]))
        for column, each in norms.items():
            squares: dict[str, float | None] = {name: next(values) ** 2 for name in each}
            if column in ("update_norm", "gradient_norm_after"):
                # What is frozen as a whole neither moves nor keeps a gradient.
                squares = {**dict.fromkeys(held, 0.0), **squares}
            columns[column] = [squares.get(name) for name in columns["parameter"]]
        return columns

    def _by_policy(self, columns: Mapping[str, Sequence[Any]]) -> Measured:
        """Return the columns of each policy's parameters; what was counted since the last time is done."""
        assert self._freezer is not None
        names = columns["parameter"]
        changed = [
            name in self._first or flips > 0 for name, flips in zip(names, columns["flipped"], strict=True)
        ]
        found = [self._find(name)[1] for name in names]
        states = [masked.options.frozen_state if masked is not None else None for masked in found]
        columns = {**columns, "changed": changed, "frozen_state": states}
        self._flips, self._first, self._weights = {}, set(), {}
        measured: Measured = {}
        for policy in self._freezer.policies:
            own = self._freezer.parameters_of(policy)
            places = [place for place, name in enumerate(names) if name in own]
            chosen = {key: [values[place] for place in places] for key, values in columns.items()}
            measured[policy] = {"kind": "freeze", **chosen}
        return measured

    def _find(self, name: str) -> tuple[MaskedOptimizer | None, MaskedParameter | None]:
        """Return the first optimizer that has a mask of a parameter, and the parameter there."""
        assert self._freezer is not None
        parameter = self._freezer.parameters[name]
        optimizers: list[Any] = self._freezer.optimizers
        for optimizer in optimizers:
            if (masked := optimizer.masked_parameters().get(parameter)) is not None:
                return optimizer, masked
        return None, None


def summary(measured: Measured) -> dict[str, float]:
    """Return one number for each quantity, as ``policy/<name>/<quantity>``.

    Example:
        >>> summary({"guided": {"kind": "flow", "phase": "fit", "active": True, "zeros_passed": None}})
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
    entries, norms = sum(columns["entries"]), {key: _total_norm(columns[key]) for key in NORMS}
    weights, ages = norms["weight_norm"], zip(columns["age_median"], columns["entries"], strict=True)
    return {
        "active_share": sum(columns["active"]) / max(entries, 1),
        "flipped": sum(columns["flipped"]),
        "gradient_norm_before": norms["gradient_norm_before"],
        "gradient_norm_after": norms["gradient_norm_after"],
        "update_size": norms["update_norm"] / weights if weights else None,
        "age_median": sum(age * count for age, count in ages if age is not None) / max(entries, 1),
        "optimizer_bytes": sum(columns["state_bytes"]),
    }


def _total_norm(norms: Iterable[float | None]) -> float:
    return math.sqrt(sum(norm**2 for norm in norms if norm is not None))


def _flow_quantities(of_ranks: Sequence[dict[str, dict[str, float]]], phase: str) -> Measured:
    """Return the quantities of flow policies: counts of the first process, norms and zeros of all."""
    measured: Measured = {}
    for name, first in of_ranks[0].items():
        parts = [part.get(name, {}) for part in of_ranks]
        total = {
            key: sum(part.get(key, 0.0) for part in parts) for key in ("before", "after", "zeros", "entries")
        }
        has_norms = any("before" in part for part in parts)
        measured[name] = {
            "kind": "flow",
            "phase": phase,
            "operations": first["operations"],
            "gradient_norm_before": math.sqrt(total["before"]) / len(parts) if has_norms else None,
            "gradient_norm_after": math.sqrt(total["after"]) / len(parts) if has_norms else None,
            "zeros_passed": total["zeros"] / total["entries"] if total["entries"] else None,
            "active": bool(first["active"]),
        }
    return measured


def _freeze_quantities(of_ranks: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """Return the columns of all processes together."""
    columns: dict[str, list[Any]] = {"parameter": list(of_ranks[0]["parameter"])}
    for key in of_ranks[0]:
        if key not in ("parameter", "ages"):
            values = zip(*(part[key] for part in of_ranks), strict=True)
            columns[key] = [_sum(each) for each in values]
    for key in NORMS:
        columns[key] = [None if square is None else math.sqrt(square) for square in columns[key]]
    samples = [np.concatenate(each) for each in zip(*(part["ages"] for part in of_ranks), strict=True)]
    quartiles = [
        np.quantile(each, (0, 0.25, 0.5, 0.75, 1), method="lower").tolist() if len(each) else [None] * 5
        for each in samples
    ]
    return columns | dict(zip(AGES, map(list, zip(*quartiles, strict=True)), strict=True))


def _sum(values: Iterable[Any]) -> Any:
    present = [value for value in values if value is not None]
    return sum(present) if present else None


def sampled_ages(masked: MaskedParameter, entries: int) -> np.ndarray:
    """Return the ages of evenly spaced entries, each of which stands for as many, on whichever process.

    Args:
        masked: What this process holds of a parameter.
        entries: How many entries the whole parameter has.
    """
    stride = max(-(-entries // SAMPLE), 1)
    known = masked.ages
    held = known.signed.numel() * known.block if known.entries else 0
    places = torch.arange(0, held, stride, device=known.signed.device)
    signed = known.signed[places // known.block].cpu().numpy().astype(np.int32)
    ages = np.where(signed > 0, signed + known.uncounted - 1, -1 - signed)
    # Entries without state are of age 0.
    without = (known.entries - held) // stride
    return np.concatenate([ages, np.zeros(without, ages.dtype)])


def active_flags(masked: MaskedParameter) -> Flags:
    """Return which of this process's entries train now."""
    return masked.ages.of_all_blocks() > 0, masked.ages.block


def flipped_entries(before: Flags, after: Flags) -> Tensor:
    """Return how many entries train in one and not in the other."""
    (old, _), (new, block) = (before, after) if before[1] >= after[1] else (after, before)
    return block * (old.reshape(-1, 1) != new.reshape(len(old), -1)).sum()


def _norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    norms = torch._foreach_norm(list(tensors.values())) if tensors else ()
    return dict(zip(tensors, norms, strict=True))


def _numbers(values: Sequence[Tensor]) -> list[float]:
    """Return tensors of one element as numbers, read at once: each reading waits for an accelerator."""
    if not values:
        return []
    device = values[0].device
    found: list[float] = torch.stack([value.double().to(device) for value in values]).tolist()
    return found


def _is_first_replica(parameter: Tensor) -> bool:
    """Return whether this process is the first of those that hold the same entries."""
    if not dist.is_initialized():
        return True
    if not is_sharded(parameter):
        return dist.get_rank() == 0
    sharded: Any = parameter
    places = zip(sharded.placements, sharded.device_mesh.get_coordinate() or (), strict=False)
    return all(place == 0 for placement, place in places if placement.is_replicate())
