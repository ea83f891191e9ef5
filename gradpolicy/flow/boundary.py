"""Rules at a module's boundary: on every tensor that enters or leaves it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradpolicy.flow.autograd_functions import (
    AdoptHistory,
    in_transform,
    insert_rule,
    is_differentiable,
)
from gradpolicy.flow.bound_rule import BoundRule, RuleState
from gradpolicy.flow.containers import classes_that_hide_tensors, map_tensors


class Boundary:
    """The rules at one side of one module.

    Args:
        location: The side and the module, for messages: ``"input of module 'trunk'"``.
        states: The rules, in the order in which the gradient meets them.
    """

    def __init__(self, location: str, states: Sequence[RuleState]) -> None:
        self.location = location
        # The rule put on last is the first that the gradient meets.
        self.bound_rules = tuple(BoundRule(state, location) for state in reversed(states))
        self._has_looked = False

    def cross(self, values: Any, crossed: list | None = None) -> Any:
        """Puts the rules between tensors and their nodes.

        Args:
            values: Tensors in tuples, lists, dicts and dataclasses.
            crossed: If given, collects the pairs of tensors before and after.
        """
        if not torch.is_grad_enabled() or not any(bound.state.active for bound in self.bound_rules):
            return values
        result = map_tensors(lambda tensor: self._cross(tensor, crossed), values, _can_have_gradient)
        if torch.compiler.is_compiling():
            return result
        if result is values or not self._has_looked:
            self._has_looked = True
            self._note_hidden_tensors(values)
        return result

    def _cross(self, tensor: Tensor, crossed: list | None) -> Tensor:
        result = tensor
        for bound_rule in self.bound_rules:
            state = bound_rule.state
            if state.active:
                state.count(self.location)
                # Under torch.compile a copy costs nothing, and an alias that is written to cannot be traced.
                value = result.clone() if torch.compiler.is_compiling() else result
                result = value.detach() if state.detaches else insert_rule(bound_rule, value)
        if crossed is not None:
            crossed.append((tensor, result))
        return result

    def _note_hidden_tensors(self, values: Any) -> None:
        for name in sorted(classes_that_hide_tensors(values)):
            for bound_rule in self.bound_rules:
                bound_rule.state.note_opaque(
                    f"{name} at {self.location}",
                    "tensors are found in tuples, lists, dicts and dataclasses; those in it pass with the "
                    "plain gradient",
                )


def adopt_writes(crossed: list[tuple[Tensor, Tensor]], versions: list[int]) -> None:
    """Gives tensors that a module wrote to through their aliases the history of the aliases.

    Args:
        crossed: The pairs of tensors and aliases.
        versions: The versions of the tensors before the module ran.
    """
    for (tensor, alias), version in zip(crossed, versions, strict=True):
        if tensor._version != version:
            # The values stay, so what was saved of them for the backward pass stays valid.
            with _unsafe_preserve_version_counter(tensor):
                AdoptHistory.apply(tensor, alias)


def _can_have_gradient(tensor: Tensor) -> bool:
    return is_differentiable(tensor) and (tensor.requires_grad or in_transform())
