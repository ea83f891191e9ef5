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
from gradpolicy.flow.forward_argument import Argument


class Boundary:
    """The rules at one side of one module.

    Args:
        location: The side and the module, for messages: ``"input of module 'trunk'"``.
        states: The rules, in the order in which the gradient meets them.
        arguments: For each rule, the one argument of the forward on which it acts, or None; if empty, each
            acts on all that passes.
    """

    def __init__(
        self, location: str, states: Sequence[RuleState], arguments: Sequence[Argument | None] = ()
    ) -> None:
        self.location = location
        # The rule put on last is the first that the gradient meets.
        self.bound_rules = tuple(BoundRule(state, location) for state in reversed(states))
        self.arguments = tuple(reversed(arguments)) if any(arguments) else ()
        self._has_looked = False

    def enter(self, args: tuple, kwargs: dict, crossed: list | None = None) -> tuple[tuple, dict]:
        """Puts the rules between the arguments of a call and their nodes, as :meth:`cross` does."""
        if not self.arguments:
            return self.cross((args, kwargs), crossed)
        by_position = [self.cross(value, crossed, self._rules_at(slot)) for slot, value in enumerate(args)]
        by_name = {slot: self.cross(value, crossed, self._rules_at(slot)) for slot, value in kwargs.items()}
        return tuple(by_position), by_name

    def cross(
        self, values: Any, crossed: list | None = None, bound_rules: Sequence[BoundRule] | None = None
    ) -> Any:
        """Puts the rules between tensors and their nodes.

        Args:
            values: Tensors in tuples, lists, dicts and dataclasses.
            crossed: If given, collects the pairs of tensors before and after.
            bound_rules: The rules for these values; all of them unless given.
        """
        rules = self.bound_rules if bound_rules is None else bound_rules
        if not torch.is_grad_enabled() or not any(bound.state.active for bound in rules):
            return values
        result = map_tensors(lambda tensor: self._cross(tensor, crossed, rules), values, _can_have_gradient)
        if torch.compiler.is_compiling():
            return result
        if result is values or not self._has_looked:
            self._has_looked = True
            self._note_hidden_tensors(values)
        return result

    def _rules_at(self, slot: int | str) -> list[BoundRule]:
        """The rules for one argument of a call."""
        chosen = zip(self.bound_rules, self.arguments, strict=True)
        return [bound for bound, argument in chosen if argument is None or argument.is_at(slot)]

    def _cross(self, tensor: Tensor, crossed: list | None, bound_rules: Sequence[BoundRule]) -> Tensor:
        result = tensor
        for bound_rule in bound_rules:
            state = bound_rule.state
            if state.active:
                state.count(self.location)
                # Under torch.compile a copy costs nothing, and an alias that is written to cannot be traced.
                value = result.clone() if torch.compiler.is_compiling() else result
                result = value.detach() if state.detaches else insert_rule(bound_rule, value)
                if state.detaches:
                    state.note_cut(self.location, [value], result)
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
