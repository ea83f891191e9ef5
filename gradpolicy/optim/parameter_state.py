"""The state that an optimizer keeps of one parameter, and the ages of its entries."""

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
from gradpolicy.tensors.sharding import is_sharded, local_shard


class ParameterState:
    """The state and the ages of a parameter that an update rule moves, or that is put back.

    With stored slices in its ages, what the rule keeps for each entry is a vector of the active ones.

    Args:
        parameter: The parameter; every entry starts active.
        wrapped: The optimizer.

    Attributes:
        parameter, wrapped: As given.
        shape: Shape of the parameter.
        rule: How the optimizer moves one entry; None where no update rule describes it.
        ages: Which of this process's entries are active, and their ages.
        updates: Number of updates of the full tensor.
        cache: What follows from mask and ages, for the updates until the next mask.
    """

    def __init__(self, parameter: Tensor, wrapped: Wrapped) -> None:
        self.parameter, self.wrapped = parameter, wrapped
        self.shape, self.rule = parameter.shape, wrapped.rule

    def begin(self, updates: int) -> None:
        """Set every entry active, with its tensor's number of updates as its age."""
        self.updates, own = updates, local_entries(self.parameter)
        self.ages = Ages.all_active(updates, tuple(own.shape), own.device)
        self.cache: dict[Any, Any] = {}

    @property
    def name(self) -> str:
        """The parameter's name for messages."""
        return self.wrapped.name_of(self.parameter)

    @property
    def group(self) -> Group:
        """The parameter's param group."""
        return self.wrapped.group_of(self.parameter)

    @property
    def values(self) -> dict[str, Any]:
        """The optimizer's state of the parameter; empty before its first update."""
        return self.wrapped.state_of(self.parameter)

    @property
    def has_master_weights(self) -> bool:
        """True if the parameter has 16 bits and is updated as float32."""
        return self.rule is not self.wrapped.rule

    def follow(self) -> dict[str, Any]:
        """Move ages to the parameter's device, and reset them if its state was removed.

        Returns:
            The optimizer's state of the parameter.

        Raises:
            PolicyError: If its shape has changed.
        """
        if self.parameter.shape != self.shape:
            raise PolicyError(
                f"a parameter of shape {tuple(self.shape)} now has the shape {tuple(self.parameter.shape)}; "
                "its masks and ages are no longer known: make a new optimizer for the model and wrap that"
            )
        if self.ages.device != self.parameter.device:
            self.ages, self.cache = self.ages.to(self.parameter.device), {}
        values, rule = self.values, self.rule
        if values or rule is None or not self.ages.entries:
            return values
        # Where other processes update their parts, a process without active entries has no state.
        counted = self.ages.oldest > 0 or (self.updates > 0 and not is_sharded(self.parameter))
        if counted and (rule.state(self.group) or rule.tensor_state(self.group, 0)):
            self.ages, self.updates, self.cache = self.ages.restarted(), 0, {}
        return values

    # --- state of entries

    def of_entries(self) -> dict[str, Tensor]:
        """Return the state that the update rule keeps for each entry, as far as it exists.

        Returns:
            Real numbers of this process in the shape of the ages or, with stored slices, a vector.

        Raises:
            PolicyError: If it was replaced by another of the wrong size, or is on another device.
        """
        names = () if self.rule is None else self.rule.names
        values, device = self.values, self.parameter.device
        shape = self.ages.shape if self.ages.stored is None else (self.ages.active,)
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

    def completed(self, group: Group, names: Iterable[str]) -> list[Tensor]:
        """Return the state of each entry, after creating what is missing of it and of the tensor's counts.

        Args:
            group: The parameter's param group.
            names: The names of both.
        """
        state = self.wrapped.optimizer.state[self.parameter]
        if any(state.get(name) is None for name in names):
            state.update(self.initial(group, packed=self.ages.stored is not None))
        found = self.of_entries()
        return [found[name] for name in names if name in found]

    def initial(self, group: Group, *, packed: bool = False) -> dict[str, Any]:
        """Return the missing part of the state, of all entries or packed of active ones."""
        assert self.rule is not None
        counts, starts = self.counts(group, self.updates), self.rule.state(group)
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

    def _filled(self, name: str, start: float, packed: bool) -> Tensor:
        own = local_shard(self.parameter)
        assert self.rule is not None
        dtype = self.rule.state_dtype(name, own.dtype)
        if packed:
            dtype = dtype.to_real() if own.is_complex() else dtype
            return torch.full((self.ages.active,), start, dtype=dtype, device=own.device)
        value = torch.zeros_like(self.parameter, dtype=dtype, memory_format=torch.preserve_format)
        return _fill(value, start) if start else value

    def dense(self) -> dict[str, Any]:
        """Return the state as the wrapped optimizer itself would hold it."""
        rule, stored = self.rule, self.ages.stored
        state = {name: value for name, value in self.values.items() if value is not None}
        if stored is not None and rule is not None:
            starts = rule.state(self.group)
            for name, value in self.of_entries().items():
                state[name] = self.shaped(stored.spread(value, starts.get(name, 0.0)))
        return state if rule is None else rule.dense_state(state, self.parameter.detach())

    def shaped(self, values: Tensor) -> Tensor:
        """Return real numbers of this process as a tensor like the parameter."""
        complex_of = {torch.float32: torch.complex64, torch.float64: torch.complex128}
        dtype = complex_of[values.dtype] if self.parameter.is_complex() else values.dtype
        shaped = torch.zeros_like(self.parameter, dtype=dtype, memory_format=torch.preserve_format)
        local_entries(shaped).copy_(values)
        return shaped.detach()

    def arrange(self, ages: Ages, forget: bool) -> None:
        """Arrange the state of each entry for new ages, one tensor after the other.

        Args:
            ages: The new ages.
            forget: True if the moments of frozen entries are emptied.
        """
        before, rule = self.ages.stored, self.rule
        empties = forget and ages.stored is None and ages.active < ages.entries
        found = self.of_entries() if before is not None or ages.stored is not None or empties else {}
        if rule is None or not found:
            return
        starts, values = rule.state(self.group), self.values
        for name, value in found.items():
            start = starts.get(name, 0.0)
            dense = value if before is None else before.spread(value, start)
            if empties and name not in rule.of_weight:
                fill_frozen(dense, ages.mask, start)
            if ages.stored is not None:
                values[name] = ages.stored.take(dense).view(-1)
            elif before is not None:
                values[name] = self.shaped(dense)

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

    def remove(self) -> bool:
        """Remove all state; return False if the optimizer's step would not create it again."""
        if isinstance(self.wrapped.optimizer, torch.optim.Adagrad):
            return False  # torch 2.11 creates it in the constructor only
        self.wrapped.optimizer.state[self.parameter] = {}
        return True

    def take_over(self) -> None:
        """Make what a param group has counted so far each entry's own, where the rule counts for entries."""
        rule, values = self.rule, self.values
        for name, value in rule.group_state(self.group).items() if rule is not None and values else ():
            if values.get(name) is None:
                values[name] = self._filled(name, value, packed=False)

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

    # --- counts

    def count(self) -> int:
        """Return the number of updates of the tensor, by its state."""
        rule = self.rule
        return step_count(self.values) if rule is None else rule.updates(self.values, self.group)


def _fill(value: Tensor, start: float) -> Tensor:
    """Fill a tensor with a number, both parts of complex ones."""
    local_entries(value).fill_(start)
    return value
