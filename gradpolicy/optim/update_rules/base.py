"""What an update rule is: how one entry of a parameter moves under an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]
"""One of the param groups of an optimizer."""
State = dict[str, Tensor]
"""What an optimizer keeps for each entry, by its name in the optimizer's state."""


class UpdateRule(ABC):
    """How one entry moves under an optimizer: its state, its numbers by age, and one pure function.

    The *age* of an entry is how many updates it has had since its state was last empty. At an update it is
    the optimizer's ``t``, counted from 1.

    Args:
        optimizer: the optimizer that the rule describes.

    Attributes:
        names: every name that `state` may have.
        kernel: name of the C body of `update`, a file of this folder; empty where there is none. It calls
            what `names` says a, b and c, in that order.
    """

    names: tuple[str, ...] = ()
    kernel = ""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def supports(self, group: Group) -> bool:
        """Whether the rule describes what the optimizer does with these settings."""
        return True

    @abstractmethod
    def state(self, group: Group) -> dict[str, float]:
        """What the optimizer keeps for each entry, and what it starts with.

        Returns:
            By its name in the optimizer's state the number that an entry of age 0 has.
        """

    def tensor_state(self, group: Group, updates: int) -> dict[str, float]:
        """What the optimizer keeps once for a tensor that has had so many updates."""
        return {"step": float(updates)}

    def updates(self, state: dict[str, Any], group: Group) -> int:
        """How many updates a tensor has had, as the optimizer's state of it tells."""
        step = state.get("step", 0)
        return int(step.item()) if isinstance(step, Tensor) else int(step)

    @abstractmethod
    def settings(self, group: Group) -> tuple[float, ...]:
        """The numbers of `update` that are the same for every entry.

        At most 16. The first is what a gradient is multiplied by: 1, or -1 for `maximize`.
        """

    def age_settings(self, group: Group) -> tuple[float, ...]:
        """What `numbers` depends on beside the age."""
        return ()

    def numbers(self, ages: Tensor, *age_settings: float) -> tuple[Tensor, ...]:
        """The numbers of `update` that follow from the age of an entry.

        Args:
            ages: 1, 2, 3, ..., without a gap, float64.
            age_settings: as `age_settings` gives them.

        Returns:
            Tensors of the shape of `ages`, float64.
        """
        return ()

    @abstractmethod
    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        settings: tuple[Any, ...],
        numbers: tuple[Tensor, ...],
    ) -> tuple[Tensor, State]:
        """One update of entries of any shape, without side effects.

        Args:
            parameter: values.
            gradient: gradients.
            state: what `state` names.
            settings: as `settings` gives them, as numbers or tensors of one number.
            numbers: as `numbers` gives them for the age of each entry; they broadcast to `parameter`.

        Returns:
            The new parameter and the new state.
        """


def weight_decay_terms(group: Group, decoupled: bool) -> tuple[float, float]:
    """Weight decay as two factors of the parameter.

    Returns:
        What is added to the gradient for each unit of the parameter (coupled decay), and what the parameter
        is multiplied by (decoupled decay: Loshchilov & Hutter 2019, arXiv:1711.05101).
    """
    decay = float(group["weight_decay"])
    return (0.0, 1.0 - float(group["lr"]) * decay) if decoupled else (decay, 1.0)


def sign_of(group: Group) -> float:
    """What the gradient is multiplied by: -1 where the objective is maximized."""
    return -1.0 if group.get("maximize") else 1.0
