"""Active rows or columns as parameters of their own, which the wrapped optimizer steps.

Where a `SubmatrixRule` describes the optimizer, a step gathers the active slices of the parameter, of its
gradient and of its state, lets the optimizer step them, and puts them back. So whatever it computes from many
entries it computes from active ones, and the state of frozen ones is not touched. Under "keep" and "zero" the
optimizer's state of the parameter is whole, as its own step makes it; under "drop" it is that of the active
slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradpolicy.optim.ages import Ages
from gradpolicy.optim.update_rules import ActiveRows, SubmatrixRule
from gradpolicy.optim.wrapped import ParameterState, Wrapped

_LISTS = {"params", "param_names"}
"""What a param group has for each of its parameters."""


class SubmatrixState(ParameterState):
    """The state of a parameter whose rows or columns the optimizer can step alone."""

    def arrange(self, before: Ages, ages: Ages, forget: bool) -> None:
        """Arrange the state for the active part, which `part` has by now; see ParameterState."""
        if self.held is not None:
            self.values.update(self._each(_spread, self.held))
        self.held = self.part if ages.stored is not None else None
        if self.part is not None and (forget or self.held is not None):
            self.values.update(self._each(_cleared if self.held is None else _taken, self.part))

    def dense(self, ages: Ages) -> dict[str, Any]:
        """Return the state as the wrapped optimizer itself would hold it."""
        return dict(self.values) if self.held is None else self.values | self._each(_spread, self.held)

    def set_count(self, updates: int) -> None:
        """Continue the tensor's own count from here."""
        if (step := self.values.get("step")) is not None:
            self.values["step"] = torch.full_like(step, updates) if isinstance(step, Tensor) else updates

    def empty(self, drop: bool) -> None:
        """Empty the state of every slice; that of the tensor stays."""
        for name in self._rule.names(self.parameter):
            if self.values.get(name) is not None:
                self.values[name].zero_()

    def of_part(self, rows: ActiveRows) -> dict[str, Any]:
        """Return the state of the active slices, as that of a parameter of their shape."""
        return dict(self.values) if self.held is not None else self.values | self._each(_taken, rows)

    def take_back(self, rows: ActiveRows, state: dict[str, Any]) -> None:
        """Take the state of the active slices after a step."""
        names = self._rule.names(self.parameter)
        values = self.wrapped.optimizer.state[self.parameter]
        for name, value in state.items():
            if name not in names or self.held is not None:
                values[name] = value
            elif values.get(name) is None:
                values[name] = _spread(rows, self._count(rows), value)
            else:
                values[name].index_copy_(rows.dim or 0, rows.positions, value)

    @property
    def _rule(self) -> SubmatrixRule:
        assert self.wrapped.submatrix is not None
        return self.wrapped.submatrix

    def _count(self, rows: ActiveRows) -> int:
        return self.parameter.shape[rows.dim or 0]

    def _each(self, function: Callable[..., Tensor], rows: ActiveRows) -> dict[str, Any]:
        """Return what a function makes of the state that belongs to slices, given some and their number."""
        names, values, count = self._rule.names(self.parameter), self.values, self._count(rows)
        return {name: function(rows, count, values[name]) for name in names if values.get(name) is not None}


# --- a step of the active slices


@contextmanager
def in_parts(wrapped: Wrapped, members: Iterable[tuple[Any, Tensor]]) -> Iterator[None]:
    """Have the active parts of parameters stand in the optimizer's param groups, as parameters of their own.

    Args:
        wrapped: The optimizer, which steps within.
        members: The masked parameters, with their gradients; the optimizer must not see these.
    """
    optimizer, settings = wrapped.optimizer, wrapped.settings
    before = [(group, {key: group[key] for key in group.keys() & _LISTS}) for group in optimizer.param_groups]
    placed = [(masked, _stand_in(masked, gradient)) for masked, gradient in members]
    try:
        for masked, stand_in in placed:
            group = wrapped.plain_group_of(masked.parameter)
            group["params"] = [*group["params"], stand_in]
            if "param_names" in group:
                group["param_names"] = [*group["param_names"], ""]
            if masked.parameter in settings:
                wrapped.settings = {**wrapped.settings, stand_in: settings[masked.parameter]}
            assert stand_in.grad is not None
            if state := _part_state(masked, stand_in.grad):
                optimizer.state[stand_in] = state
        yield
    finally:
        wrapped.settings = settings
        for group, lists in before:
            group.update(lists)
        states = [optimizer.state.pop(stand_in, {}) for _, stand_in in placed]
    for (masked, stand_in), state in zip(placed, states, strict=True):
        rows = masked.state.part
        masked.parameter.index_copy_(rows.dim or 0, rows.positions, stand_in.detach())
        masked.state.take_back(rows, state)


def _stand_in(masked: Any, gradient: Tensor) -> nn.Parameter:
    """Return the active slices of a parameter as a parameter with a gradient."""
    rows = masked.state.part
    made = nn.Parameter(rows.select(masked.parameter.detach()))
    made.grad = rows.select(gradient)
    return made


def _part_state(masked: Any, gradient: Tensor) -> dict[str, Any]:
    """Return the state of the slices of a parameter that are to be stepped alone by this gradient."""
    rows, rule = masked.state.part, masked.submatrix
    state: dict[str, Any] = masked.state.of_part(rows)
    if state and rule.begins and masked.options.bias_correction == "entry":
        # The age of a row is that of its oldest entry.
        ages = masked.age().movedim(rows.dim or 0, 0)
        ages = ages.flatten(1).amax(1) if ages.dim() > 1 else ages
        young = ages.expand(masked.parameter.shape[rows.dim or 0])[rows.positions] == 0
        if young.any():
            rule.begin(state, gradient, young)
    return state


def rows_differ(masked: Any) -> bool:
    """Return True if the optimizer's own step would be wrong for some rows, all of which are active."""
    if masked.submatrix is None or not masked.submatrix.begins or not masked.state.values:
        return False
    return masked.options.bias_correction == "entry" and bool((masked.age() == 0).any())


# --- the slices of a tensor of state


def _taken(rows: ActiveRows, count: int, value: Tensor) -> Tensor:
    """Return some of so many slices."""
    return value.index_select(rows.dim or 0, rows.positions)


def _spread(rows: ActiveRows, count: int, value: Tensor) -> Tensor:
    """Return so many slices, of which some are given and the others 0."""
    shape, dim = list(value.shape), rows.dim or 0
    shape[dim] = count
    return value.new_zeros(shape).index_copy_(dim, rows.positions, value)


def _cleared(rows: ActiveRows, count: int, value: Tensor) -> Tensor:
    """Set all but some of so many slices to 0, in place."""
    others = torch.ones(count, dtype=torch.bool, device=value.device).index_fill_(0, rows.positions, False)
    return value.index_fill_(rows.dim or 0, others.nonzero().flatten(), 0)
