"""The state that the optimizer keeps of a parameter, or of its active entries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim.ages import Ages
from gradpolicy.optim.shapes import fill_frozen, local_entries
from gradpolicy.optim.update_rules import Group
from gradpolicy.optim.update_rules.base import step_count
from gradpolicy.optim.update_rules.master_weights import DTYPES
from gradpolicy.optim.wrapped import Wrapped
from gradpolicy.tensors.sharding import local_shard


class ParameterState:
    """The state of a parameter that an update rule moves, or that is put back.

    With an index in its ages, what the update rule keeps for each entry is a vector of the active entries.

    Args:
        parameter: The parameter.
        wrapped: The optimizer.

    Attributes:
        rule: How the optimizer moves one entry; None where no update rule describes it.
    """

    def __init__(self, parameter: Tensor, wrapped: Wrapped) -> None:
        self.parameter, self.wrapped, self.rule = parameter, wrapped, wrapped.rule

    def take_over(self) -> None:
        """Make what a param group has counted so far each entry's own, where the rule counts for entries."""
        rule, values = self.rule, self.values
        for name, value in rule.group_state(self.group).items() if rule is not None and values else ():
            if values.get(name) is None:
                values[name] = self._filled(name, value, None)

    @property
    def group(self) -> Group:
        """The parameter's param group."""
        return self.wrapped.group_of(self.parameter)

    @property
    def values(self) -> dict[str, Any]:
        """The optimizer's state of the parameter; empty before its first update."""
        return self.wrapped.state_of(self.parameter)

    def of_entries(self, ages: Ages) -> dict[str, Tensor]:
        """Return the state that the update rule keeps for each entry, as far as it exists.

        Returns:
            Real numbers of this process in the shape of the ages or, with an index, of the active entries.

        Raises:
            PolicyError: If it was replaced by another of the wrong size, or is on another device.
        """
        names = () if self.rule is None else self.rule.names
        values, device = self.values, self.parameter.device
        shape = ages.shape if ages.stored is None else (ages.active,)
        found: dict[str, Tensor] = {}
        for name in names:
            if (value := values.get(name)) is None:
                continue
            found[name] = local_entries(value) if value.device == device else value
            if found[name].shape != shape or value.device != device:
                raise PolicyError(
                    f"the optimizer's state {name!r} of a parameter of shape {tuple(self.parameter.shape)} "
                    f"on {device} has the shape {tuple(value.shape)} and is on {value.device}; "
                    "load a state_dict of this model, or move the state along with it"
                )
        return found

    def completed(
        self, group: Group, ages: Ages, updates: int, names: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the state of each entry, after creating what is missing of it and of the tensor's counts.

        Args:
            group: The parameter's param group.
            ages: Its ages.
            updates: Number of updates of the tensor.
            names: The names of both, which the rule says if they are not given.
        """
        rule, state = self.rule, self.wrapped.optimizer.state[self.parameter]
        assert rule is not None
        names = (*rule.state(group), *rule.tensor_state(group, 0)) if names is None else names
        for name in names:
            if state.get(name) is None:
                state.update(self.initial(group, updates, ages.active if ages.stored is not None else None))
                break
        found = self.of_entries(ages)
        return {name: found[name] for name in names if name in found}

    def initial(self, group: Group, updates: int, packed: int | None = None) -> dict[str, Any]:
        """Return the missing part of the state of a parameter.

        Args:
            group: The parameter's param group.
            updates: Number of updates of the tensor.
            packed: Number of entries with state; None: all of them, in the parameter's shape.
        """
        assert self.rule is not None
        counts, starts = self.counts(group, updates), self.rule.state(group)
        missing = [name for name in (*counts, *starts) if self.values.get(name) is None]
        return {
            name: counts[name] if name in counts else self._filled(name, starts[name], packed)
            for name in missing
        }

    def counts(self, group: Group, updates: int) -> dict[str, Tensor]:
        """Return what the rule keeps once for the tensor, after a number of updates, as torch stores it."""
        rule, fused = self.rule, bool(group.get("fused"))
        double = torch.get_default_dtype() == torch.float64 and not fused
        dtype = torch.float64 if double else torch.float32
        device = self.parameter.device if group.get("capturable") or fused else "cpu"
        counts = {} if rule is None else rule.tensor_state(group, updates)
        return {name: torch.tensor(value, dtype=dtype, device=device) for name, value in counts.items()}

    def _filled(self, name: str, start: float, packed: int | None) -> Tensor:
        own = local_shard(self.parameter)
        assert self.rule is not None
        dtype = self.rule.state_dtype(name, own.dtype)
        if packed is not None:
            dtype = dtype.to_real() if own.is_complex() else dtype
            return torch.full((packed,), start, dtype=dtype, device=own.device)
        value = torch.zeros_like(self.parameter, dtype=dtype, memory_format=torch.preserve_format)
        return _fill(value, start) if start else value

    def dense(self, ages: Ages) -> dict[str, Any]:
        """Return the state as the wrapped optimizer itself would hold it."""
        rule = self.rule
        state = {name: value for name, value in self.values.items() if value is not None}
        if ages.stored is not None:
            assert rule is not None
            starts = rule.state(self.group)
            for name, value in self.of_entries(ages).items():
                state[name] = self.shaped(ages.stored.spread(value, starts.get(name, 0.0)))
        return state if rule is None else rule.dense_state(state, self.parameter.detach())

    def shaped(self, values: Tensor) -> Tensor:
        """Return real numbers of this process as a tensor like the parameter."""
        complex_of = {torch.float32: torch.complex64, torch.float64: torch.complex128}
        dtype = complex_of[values.dtype] if self.parameter.is_complex() else values.dtype
        shaped = torch.zeros_like(self.parameter, dtype=dtype, memory_format=torch.preserve_format)
        local_entries(shaped).copy_(values)
        return shaped.detach()

    @property
    def has_master_weights(self) -> bool:
        """True if the parameter has 16 bits and is updated as float32."""
        return self.rule is not self.wrapped.rule

    def keep_master_weights(self, wanted: bool) -> None:
        """Update the parameter as float32 from now on, if that is wanted and it has 16 bits.

        Raises:
            PolicyError: If no update rule describes the optimizer.
        """
        if not wanted or self.parameter.dtype not in DTYPES:
            return
        self.rule, values = self.wrapped.master_rule(self.parameter), self.values
        for name in self.rule.names:
            if values.get(name) is not None:
                values[name] = values[name].to(self.rule.state_dtype(name, self.parameter.dtype))

    def arrange(self, before: Ages, ages: Ages, forget: bool) -> None:
        """Arrange the state of each entry for new ages, one tensor after the other.

        Args:
            before: The ages of the present state.
            ages: The new ages.
            forget: True if the moments of frozen entries are emptied.
        """
        rule = self.rule
        repacks = before.stored is not None or ages.stored is not None
        empties = forget and ages.stored is None and ages.active < ages.entries
        if rule is None or not (repacks or empties):
            return
        starts, values = rule.state(self.group), self.values
        for name, value in self.of_entries(before).items():
            start = starts.get(name, 0.0)
            dense = value if before.stored is None else before.stored.spread(value, start)
            if empties and name not in rule.of_weight:
                fill_frozen(dense, ages.mask, start)
            if ages.stored is not None:
                values[name] = ages.stored.take(dense).view(-1)
            elif before.stored is not None:
                values[name] = self.shaped(dense)

    def set_count(self, updates: int) -> None:
        """Set the tensor's own count of updates."""
        rule = self.rule
        counts = {"step": float(updates)} if rule is None else rule.tensor_state(self.group, updates)
        for name, value in counts.items():
            if isinstance(self.values.get(name), Tensor):
                self.values[name].fill_(value)

    def count(self) -> int:
        """Return the number of updates of the tensor, by its state."""
        rule = self.rule
        return step_count(self.values) if rule is None else rule.updates(self.values, self.group)

    def remove(self) -> bool:
        """Remove all state; return False if the optimizer's step would not create it again."""
        if isinstance(self.wrapped.optimizer, torch.optim.Adagrad):
            return False  # torch 2.11 creates it in the constructor only
        self.wrapped.optimizer.state[self.parameter] = {}
        return True

    def empty(self, drop: bool) -> None:
        """Empty the state that the update rule keeps for each entry.

        Args:
            drop: True if it is to take no memory. Its names stay, with None, which tells it apart from
                state that a caller removed.
        """
        assert self.rule is not None
        values, starts = self.values, self.rule.state(self.group)
        for name in self.rule.names:
            if values.get(name) is not None and (drop or name not in self.rule.of_weight):
                values[name] = None if drop else _fill(values[name], starts.get(name, 0.0))


def _fill(value: Tensor, start: float) -> Tensor:
    """Fill a tensor with a number, both parts of complex ones."""
    local_entries(value).fill_(start)
    return value
