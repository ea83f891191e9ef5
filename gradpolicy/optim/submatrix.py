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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradpolicy.optim.ages import Ages
from gradpolicy.optim.update_rules import SubmatrixRule
from gradpolicy.optim.wrapped import ParameterState, Wrapped
from gradpolicy.tensors.row_gradient import ActiveRows, RowGradient, whole_gradient

_LISTS = {"params", "param_names"}
"""What a param group has for each of its parameters."""


class SubmatrixState(ParameterState):
    """The state of a parameter whose rows or columns the optimizer can step alone."""

    def arrange(self, source: Tensor | None, block: int, ages: Ages, forget: bool) -> None:
        """Arrange the state for the active part, which `part` has by now; see ParameterState."""
        if self.held is not None:
            self.values.update(self._each(_spread, self.held))
        self.held = self.part if ages.index is not None else None
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
        none = torch.empty(0, dtype=torch.long, device=self.parameter.device)
        self._each(_cleared, *self._place(ActiveRows(none, self.held and self.held.dim)))

    def of_part(self, rows: ActiveRows) -> dict[str, Any]:
        """Return the state of some of the slices that have any, as that of a parameter of their shape."""
        place, count = self._place(rows)
        alone = {} if len(place.positions) == count else self._each(_taken, place, count)
        return self.values | alone

    def take_back(self, rows: ActiveRows, state: dict[str, Any]) -> None:
        """Take the state of some slices after a step."""
        (place, count), rule = self._place(rows), self._rule
        values, names = self.wrapped.optimizer.state[self.parameter], rule.names(self.parameter)
        for name, value in state.items():
            if name not in names or len(place.positions) == count:
                values[name] = value
            elif values.get(name) is None:
                values[name] = rule.each(partial(_spread, place, count), value)
            else:
                rule.each(partial(_put, place, count), values[name], value)

    @property
    def _rule(self) -> SubmatrixRule:
        assert self.wrapped.submatrix is not None
        return self.wrapped.submatrix

    def _each(self, function: Callable[..., Tensor], rows: ActiveRows, count: int = 0) -> dict[str, Any]:
        """Return what a function makes of the state that belongs to slices, given some of so many of them."""
        names, values = self._rule.names(self.parameter), self.values
        own = partial(function, rows, count or self.parameter.shape[rows.dim or 0])
        return {name: self._rule.each(own, values[name]) for name in names if values.get(name) is not None}

    def _place(self, rows: ActiveRows) -> tuple[ActiveRows, int]:
        """Return the place of slices among those that have state, and the number of these."""
        if self.held is None:
            return rows, self.parameter.shape[rows.dim or 0]
        places = torch.searchsorted(self.held.positions, rows.positions)
        return rows._replace(positions=places), len(self.held.positions)


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
    placed = [(each, rows, _stand_in(each, rows, grad)) for each, grad in members for rows in each.parts()]
    try:
        for masked, rows, stand_in in placed:
            group = wrapped.plain_group_of(masked.parameter)
            group["params"] = [*group["params"], stand_in]
            if "param_names" in group:
                group["param_names"] = [*group["param_names"], ""]
            if masked.parameter in settings:
                wrapped.settings = {**wrapped.settings, stand_in: settings[masked.parameter]}
            if state := masked.part_state(rows, stand_in.grad):
                optimizer.state[stand_in] = state
        yield
    finally:
        wrapped.settings = settings
        for group, lists in before:
            group.update(lists)
        states = [optimizer.state.pop(stand_in, {}) for _, _, stand_in in placed]
    for (masked, rows, stand_in), state in zip(placed, states, strict=True):
        masked.parameter.index_copy_(rows.dim or 0, rows.positions, stand_in.detach())
        masked.state.take_back(rows, state)


def _stand_in(masked: Any, rows: ActiveRows, gradient: Tensor) -> nn.Parameter:
    """Return some active slices of a parameter as a parameter with a gradient."""
    part, made = masked.state.part, nn.Parameter(rows.select(masked.parameter.detach()))
    if isinstance(gradient, RowGradient) and gradient.holds(part):
        places = torch.searchsorted(part.positions, rows.positions)
        made.grad = gradient.held.index_select(rows.dim or 0, places)
    else:
        made.grad = rows.select(whole_gradient(gradient))
    return made


# --- the slices of a tensor of state


def _by_slices(value: Tensor, dim: int | None, count: int) -> Tensor:
    """Return a view of state in which a slice of the parameter is one of the tensor, along the dimension.

    A row of a parameter may be several numbers of a vector, such as the scales of its blocks.
    """
    return value if dim else value.unflatten(0, (count, -1))


def _taken(rows: ActiveRows, count: int, value: Tensor) -> Tensor:
    """Return some of so many slices."""
    taken = _by_slices(value, rows.dim, count).index_select(rows.dim or 0, rows.positions)
    return taken if rows.dim else taken.flatten(0, 1)


def _put(rows: ActiveRows, count: int, whole: Tensor, value: Tensor) -> Tensor:
    """Write some of so many slices to where they belong, in place."""
    own = _by_slices(value, rows.dim, len(rows.positions))
    _by_slices(whole, rows.dim, count).index_copy_(rows.dim or 0, rows.positions, own)
    return whole


def _spread(rows: ActiveRows, count: int, value: Tensor) -> Tensor:
    """Return so many slices, of which some are given and the others 0."""
    shape, dim = list(value.shape), rows.dim or 0
    shape[dim] = shape[dim] // len(rows.positions) * count
    return _put(rows, count, value.new_zeros(shape), value)


def _cleared(rows: ActiveRows, count: int, value: Tensor) -> Tensor:
    """Set all but some of so many slices to 0, in place."""
    others = torch.ones(count, dtype=torch.bool, device=value.device).index_fill_(0, rows.positions, False)
    _by_slices(value, rows.dim, count).index_fill_(rows.dim or 0, others.nonzero().flatten(), 0)
    return value
