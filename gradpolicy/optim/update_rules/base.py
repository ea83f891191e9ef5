"""Update rules: how an optimizer moves one entry of a parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]
"""One of the param groups of an optimizer."""
State = dict[str, Tensor]
"""The state of entries, by its name in the optimizer's state."""
Settings = tuple[Any, ...]
"""Numbers of an update that are the same for every entry."""
Numbers = tuple[Tensor, ...]
"""Numbers of an update that follow from the age of an entry."""


class UpdateRule(ABC):
    """How one entry moves under an optimizer: its state, its numbers by age, and one pure function.

    The *age* of an entry is the number of its updates since its state was last empty. In an update it is the
    optimizer's ``t``, counted from 1.

    Args:
        optimizer: The optimizer that the rule describes.

    Attributes:
        names: Every name that `state` may have.
        counts_in_group: True if the optimizer counts its steps once for a param group. A parameter that has
            had a mask then always moves by the rule, which counts for each entry.
        counts_in_tensor: True if it keeps a step count of each tensor.
        of_weight: The names whose state belongs to the weight, so that "zero" leaves it.
        kind: Which compiled code serves the rule.
    """

    names: tuple[str, ...] = ()
    of_weight: tuple[str, ...] = ()
    counts_in_group = False
    counts_in_tensor = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.kind: Hashable = type(self)

    def state_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the state of a name, for a parameter of a dtype."""
        return dtype

    def supports(self, group: Group) -> bool:
        """Return True if the rule describes the optimizer with these settings."""
        return True

    @abstractmethod
    def state(self, group: Group) -> dict[str, float]:
        """Return the initial value of each state of an entry, by name."""

    def tensor_state(self, group: Group, updates: int) -> dict[str, float]:
        """Return the state that the optimizer keeps once per tensor, after a number of updates."""
        return {"step": float(updates)} if self.counts_in_tensor else {}

    def group_state(self, group: Group) -> dict[str, float]:
        """Return the state of entries that the optimizer's own step keeps once for a param group."""
        return {}

    def dense_state(self, state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Return the state of a full parameter as the optimizer itself would have it."""
        return state

    def begins_alone(self, state: dict[str, Any], group: Group) -> bool:
        """Return True if the first update of a parameter that has had a mask must be made by the rule."""
        return False

    def updates(self, state: dict[str, Any], group: Group) -> int:
        """Return the number of updates of a tensor, by the optimizer's state."""
        return step_count(state)

    @abstractmethod
    def settings(self, group: Group) -> tuple[float, ...]:
        """Return the numbers of `update` that are the same for every entry, at most 16.

        The first is the factor of the gradient: 1, or -1 for `maximize`.
        """

    def bases(self, group: Group) -> tuple[float, ...]:
        """Return the bases of the rule's moving averages.

        For each base b the first `numbers` of `update` are 1 - b^t, the weight that it has collected.
        """
        return ()

    def age_settings(self, group: Group) -> tuple[float, ...]:
        """Return the settings that `numbers` depends on."""
        return ()

    def numbers(self, ages: Tensor, *age_settings: float) -> Numbers:
        """Return other numbers of `update` that follow from the age of an entry.

        Args:
            ages: 1, 2, 3, ..., without a gap, float64.
            age_settings: The result of `age_settings`.

        Returns:
            Tensors of the shape of `ages`, float64.
        """
        return ()

    @abstractmethod
    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """Return entries of any shape and their state after one update, without side effects.

        Args:
            parameter: Values.
            gradient: Gradients.
            state: The state by the names of `state`.
            settings: The result of `settings`, as numbers or tensors of one number.
            numbers: The weights of `bases` and the result of `numbers` for the age of each entry, which
                broadcast to `parameter`.
        """


def step_count(state: dict[str, Any]) -> int:
    """Return the step count in an optimizer's state of a parameter; 0 where it has none."""
    return int(state.get("step", 0))


def sign_of(group: Group) -> float:
    """Return the factor of the gradient: -1 where the objective is maximized."""
    return -1.0 if group.get("maximize") else 1.0
