"""The optimizer that a MaskedOptimizer wraps, and the state that it keeps of a parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim.ages import Ages
from gradpolicy.optim.optimizers import Optimizers
from gradpolicy.optim.own_settings import Settings, with_settings
from gradpolicy.optim.put_back import is_torchs_own, reset_state
from gradpolicy.optim.shapes import local_entries
from gradpolicy.optim.update_rules import ActiveRows, Group, rule_for, submatrix_rule_for
from gradpolicy.optim.update_rules.base import step_count
from gradpolicy.tensors.sharding import local_shard


class Wrapped:
    """A wrapped optimizer, and the one place where the group of a parameter is looked up.

    Args:
        optimizer: The optimizer.

    Attributes:
        optimizer: As given.
        rule: How it moves one entry; None where no update rule describes it.
        submatrix: Which rows or columns it can step alone; None for no optimizer that has such a rule.
        settings: Settings of single parameters, which replace those of their param groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.rule, self.submatrix = rule_for(optimizer), submatrix_rule_for(optimizer)
        self.settings: dict[Tensor, Settings] = {}
        self._places: dict[int, tuple[int, int]] = {}

    @functools.cached_property
    def needs_closure(self) -> bool:
        """True if a step needs a closure. Such optimizers also move tensors that have no gradient."""
        step = inspect.unwrap(type(self.optimizer).step)
        closure = inspect.signature(step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty

    @functools.cached_property
    def calls_closure(self) -> bool:
        """True if a step must call the closure itself, perhaps more than once, as SAM does."""
        known = self.rule is not None or self.submatrix is not None
        simple = known or isinstance(self.optimizer, Optimizers) or is_torchs_own(self.optimizer)
        return self.needs_closure or not simple

    def begin_state(self) -> None:
        """Give each parameter a state, empty until its first update.

        Without any, torch.distributed.checkpoint would take a first step to create it.
        """
        parts = self.optimizer.optimizers if isinstance(self.optimizer, Optimizers) else [self.optimizer]
        for part in parts:
            # Adagrad creates state itself, and cannot be copied with an empty one.
            groups = [] if isinstance(part, torch.optim.Adagrad) else part.param_groups
            for parameter in (parameter for group in groups for parameter in group["params"]):
                self.optimizer.state.setdefault(parameter, {})

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimizer's state of a parameter; empty before its first update."""
        return self.optimizer.state.get(parameter, {})

    def group_of(self, parameter: Tensor) -> Group:
        """Return the param group of a parameter, with its own settings in it.

        Raises:
            PolicyError: If it is not the optimizer's.
        """
        group, own = self.plain_group_of(parameter), self.settings.get(parameter)
        return with_settings(group, own) if own else group

    def plain_group_of(self, parameter: Tensor) -> Group:
        """Return the param group that a parameter is in."""
        return self.optimizer.param_groups[self._place_of(parameter)[0]]

    def has(self, parameter: Tensor) -> bool:
        """Return True for a parameter of the optimizer."""
        return self._find(parameter) is not None

    @contextmanager
    def restricted_to(self, parameter: Tensor) -> Iterator[None]:
        """Leave the optimizer only one parameter in the block, or none if it has not this one."""
        groups, place = self.optimizer.param_groups, self._find(parameter)
        before, group = list(groups), {} if place is None else groups[place[0]]
        lists = {key: group[key] for key in ["params", "param_names"] if key in group}
        if place is not None:
            group.update({key: [values[place[1]]] for key, values in lists.items()})
        places, self._places = self._places, {}
        groups[:] = [] if place is None else [group]
        try:
            yield
        finally:
            group.update(lists)
            groups[:], self._places = before, places

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter for messages.

        Raises:
            PolicyError: If it is not the optimizer's.
        """
        index, position = self._place_of(parameter)
        names = self.optimizer.param_groups[index].get("param_names")
        return repr(names[position]) if names else f"parameter {position} of group {index}"

    def _place_of(self, parameter: Any) -> tuple[int, int]:
        """Return the index of a parameter's group, and its position there."""
        if (found := self._find(parameter)) is not None:
            return found
        shape = f" of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else f" {parameter!r}"
        shapes = sorted({str(tuple(known.shape)) for known in self.parameters()})
        raise PolicyError(
            f"the parameter{shape} is not one of the wrapped optimizer's; "
            f"its parameters have the shapes {', '.join(shapes[:8])}{', ...' if len(shapes) > 8 else ''}"
        )

    def _find(self, parameter: Any) -> tuple[int, int] | None:
        """Return the same, None for a parameter of others; groups may have changed since the last call."""
        groups = self.optimizer.param_groups
        index, position = self._places.get(id(parameter), (0, 0))
        members = groups[index]["params"] if index < len(groups) else []
        if position < len(members) and members[position] is parameter:
            return index, position
        self._places = {
            id(known): (index, position)
            for index, group in enumerate(groups)
            for position, known in enumerate(group["params"])
        }
        return self._places.get(id(parameter))


class ParameterState:
    """The state of a parameter, which the wrapped optimizer keeps: dense, or of active entries only.

    With an index in its ages, what the update rule keeps for each entry is a vector of the active entries.

    Args:
        parameter: The parameter.
        wrapped: The optimizer.

    Attributes:
        part: The rows or columns that the optimizer steps alone; None where it does not.
        held: The rows or columns that have state; None for all, and where single entries may have it.
    """

    part: ActiveRows | None = None
    held: ActiveRows | None = None

    def __init__(self, parameter: Tensor, wrapped: Wrapped) -> None:
        self.parameter, self.wrapped = parameter, wrapped

    def take_over(self) -> None:
        """Make what a param group has counted so far each entry's own, where the rule counts for entries."""
        rule, values = self.wrapped.rule, self.values
        for name, value in rule.group_state(self.group).items() if rule is not None and values else ():
            if values.get(name) is None:
                values[name] = self._filled(value, None)

    def to(self, device: torch.device) -> None:
        """Follow the parameter to another device; the optimizer's state does so by itself."""
        both = [
            rows and rows._replace(positions=rows.positions.to(device)) for rows in (self.part, self.held)
        ]
        self.part, self.held = both

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
        names = () if self.wrapped.rule is None else self.wrapped.rule.names
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

    def completed(self, group: Group, ages: Ages, updates: int) -> dict[str, Tensor]:
        """Return the state of each entry, after creating what is missing of it and of the tensor's counts."""
        assert self.wrapped.rule is not None
        names = self.wrapped.rule.state(group)
        state = self.wrapped.optimizer.state[self.parameter]
        counts = self.wrapped.rule.tensor_state(group, 0)
        if any(state.get(name) is None for name in (*names, *counts)):
            state.update(self.initial(group, updates, ages.active if ages.stored is not None else None))
        found = self.of_entries(ages)
        return {name: found[name] for name in names}

    def initial(self, group: Group, updates: int, packed: int | None = None) -> dict[str, Any]:
        """Return the missing part of the state of a parameter.

        Args:
            group: The parameter's param group.
            updates: Number of updates of the tensor.
            packed: Number of entries with state; None: all of them, in the parameter's shape.
        """
        rule = self.wrapped.rule
        assert rule is not None
        counts = self.counts(group, updates).items()
        made: dict[str, Any] = {name: each for name, each in counts if self.values.get(name) is None}
        for name, start in rule.state(group).items():
            if self.values.get(name) is None:
                made[name] = self._filled(start, packed)
        return made

    def counts(self, group: Group, updates: int) -> dict[str, Tensor]:
        """Return what the rule keeps once for the tensor, after a number of updates."""
        rule = self.wrapped.rule
        counts = {} if rule is None else rule.tensor_state(group, updates)
        return {name: self._number(group, value) for name, value in counts.items()}

    def _number(self, group: Group, value: float) -> Tensor:
        """Return a count as torch's optimizers store it."""
        fused = bool(group.get("fused"))
        on_device = bool(group.get("capturable")) or fused
        double = torch.get_default_dtype() == torch.float64 and not fused
        dtype = torch.float64 if double else torch.float32
        return torch.tensor(value, dtype=dtype, device=self.parameter.device if on_device else "cpu")

    def _filled(self, start: float, packed: int | None) -> Tensor:
        own = local_shard(self.parameter)
        if packed is not None:
            dtype = own.dtype.to_real() if own.is_complex() else own.dtype
            return torch.full((packed,), start, dtype=dtype, device=own.device)
        value = torch.zeros_like(self.parameter, memory_format=torch.preserve_format)
        return _fill(value, start) if start else value

    def dense(self, ages: Ages) -> dict[str, Any]:
        """Return the state as the wrapped optimizer itself would hold it."""
        rule = self.wrapped.rule
        state = {name: value for name, value in self.values.items() if value is not None}
        if ages.stored is not None:
            assert rule is not None
            starts = rule.state(self.group)
            for name, value in self.of_entries(ages).items():
                state[name] = self._shaped(ages.stored.spread(value, starts.get(name, 0.0)))
        return state if rule is None else rule.dense_state(state, self.parameter.detach())

    def _shaped(self, values: Tensor) -> Tensor:
        """Return real numbers of this process as a tensor like the parameter."""
        complex_of = {torch.float32: torch.complex64, torch.float64: torch.complex128}
        dtype = complex_of[values.dtype] if self.parameter.is_complex() else values.dtype
        shaped = torch.zeros_like(self.parameter, dtype=dtype, memory_format=torch.preserve_format)
        local_entries(shaped).copy_(values)
        return shaped.detach()

    def arrange(self, before: Ages, ages: Ages, forget: bool) -> None:
        """Arrange the state of each entry for new ages, one tensor after the other.

        Args:
            before: The ages of the present state.
            ages: The new ages.
            forget: True if the state of frozen entries is emptied.
        """
        rule = self.wrapped.rule
        repacks = before.stored is not None or ages.stored is not None
        empties = forget and ages.stored is None and ages.active < ages.entries
        if rule is None or not (repacks or empties):
            return
        starts, values = rule.state(self.group), self.values
        for name, value in self.of_entries(before).items():
            start = starts.get(name, 0.0)
            dense = value if before.stored is None else before.stored.spread(value, start)
            if empties:
                dense.masked_fill_(~ages.mask, start)
            if ages.stored is not None:
                values[name] = ages.stored.take(dense).view(-1)
            elif before.stored is not None:
                values[name] = self._shaped(dense)

    def set_count(self, updates: int) -> None:
        """Set the tensor's own count of updates."""
        rule = self.wrapped.rule
        counts = {"step": float(updates)} if rule is None else rule.tensor_state(self.group, updates)
        for name, value in counts.items():
            if isinstance(self.values.get(name), Tensor):
                self.values[name].fill_(value)

    def count(self) -> int:
        """Return the number of updates of the tensor, by its state."""
        rule = self.wrapped.rule
        return step_count(self.values) if rule is None else rule.updates(self.values, self.group)

    def remove(self) -> bool:
        """Remove all state; return False if the optimizer's step would not create it again."""
        if isinstance(self.wrapped.optimizer, torch.optim.Adagrad):
            return False  # torch 2.11 creates it in the constructor only
        self.wrapped.optimizer.state[self.parameter] = {}
        return True

    def empty(self, drop: bool) -> None:
        """Empty the state of every entry.

        Args:
            drop: True if it is to take no memory. Its names stay, with None, which tells it apart from
                state that a caller removed.
        """
        rule, values, group = self.wrapped.rule, self.values, self.group
        if rule is None:
            reset_state(self.wrapped.optimizer, group, self.parameter, values)
            return
        starts = rule.state(group)
        for name in rule.names:
            if values.get(name) is not None:
                values[name] = None if drop else _fill(values[name], starts.get(name, 0.0))


def _fill(value: Tensor, start: float) -> Tensor:
    """Fill a tensor with a number, both parts of complex ones."""
    local_entries(value).fill_(start)
    return value
