"""The optimizer that a MaskedOptimizer wraps: its update rule, groups, state and names."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim.update_rules import Group, rule_for


class Wrapped:
    """A wrapped optimizer, and the one place where the group of a parameter is looked up.

    Args:
        optimizer: The optimizer.

    Attributes:
        optimizer: As given.
        rule: How it moves one entry; None where no update rule describes it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.rule = rule_for(optimizer)
        self._places: dict[int, tuple[int, int]] = {}

    @property
    def needs_closure(self) -> bool:
        """True if a step needs a closure. Such optimizers also move tensors that have no gradient."""
        step = inspect.unwrap(type(self.optimizer).step)
        closure = inspect.signature(step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimizer's state of a parameter; empty before its first update."""
        return self.optimizer.state.get(parameter, {})

    def group_of(self, parameter: Tensor) -> Group:
        """Return the param group of a parameter.

        Raises:
            PolicyError: If it is not the optimizer's.
        """
        return self.optimizer.param_groups[self._place_of(parameter)[0]]

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter for messages.

        Raises:
            PolicyError: If it is not the optimizer's.
        """
        index, position = self._place_of(parameter)
        names = self.optimizer.param_groups[index].get("param_names")
        return repr(names[position]) if names else f"parameter {position} of group {index}"

    def _place_of(self, parameter: Any) -> tuple[int, int]:
        """Return the index of a parameter's group and its position there; groups may have changed since."""
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
        if id(parameter) not in self._places:
            raise self._unknown(parameter)
        return self._places[id(parameter)]

    def _unknown(self, parameter: Any) -> PolicyError:
        shape = f" of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else f" {parameter!r}"
        shapes = sorted({str(tuple(known.shape)) for known in self.parameters()})
        return PolicyError(
            f"the parameter{shape} is not one of the wrapped optimizer's; "
            f"its parameters have the shapes {', '.join(shapes[:8])}{', ...' if len(shapes) > 8 else ''}"
        )
