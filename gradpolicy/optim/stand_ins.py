"""Active rows or columns as parameters of their own, which the wrapped optimizer steps.

Where a `SubmatrixRule` describes the optimizer, a step gathers the active slices of the parameter, of its
gradient and of its state, lets the optimizer step them, and puts them back. So whatever it computes from many
entries it computes from active ones, and the state of frozen ones is not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.wrapped import Wrapped
from gradpolicy.tensors.row_gradient import ActiveRows, RowGradient, whole_gradient


@contextmanager
def in_parts(wrapped: Wrapped, members: Iterable[tuple[MaskedParameter, Tensor]]) -> Iterator[None]:
    """Have the active parts of parameters stand in the optimizer's param groups, as parameters of their own.

    Args:
        wrapped: The optimizer, which steps within.
        members: The parameters, with their gradients; the optimizer must not see these.
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
            if state := masked.part_state(rows, stand_in.grad):  # type: ignore[arg-type]
                optimizer.state[stand_in] = state
        yield
    finally:
        wrapped.settings = settings
        for group, lists in before:
            group.update(lists)
        states = [optimizer.state.pop(stand_in, {}) for _, _, stand_in in placed]
    for (masked, rows, stand_in), state in zip(placed, states, strict=True):
        masked.parameter.index_copy_(rows.dim or 0, rows.positions, stand_in.detach())
        masked.state.take_back(rows, state)  # type: ignore[attr-defined]


_LISTS = {"params", "param_names"}
"""What a param group has for each of its parameters."""


def _stand_in(masked: MaskedParameter, rows: ActiveRows, gradient: Tensor) -> nn.Parameter:
    """Return some active slices of a parameter as a parameter with a gradient."""
    part, made = masked.state.part, nn.Parameter(rows.select(masked.parameter.detach()))
    if isinstance(gradient, RowGradient) and gradient.holds(part):
        places = torch.searchsorted(part.positions, rows.positions)  # type: ignore[union-attr]
        made.grad = gradient.held.index_select(rows.dim or 0, places)
    else:
        made.grad = rows.select(whole_gradient(gradient))
    return made
