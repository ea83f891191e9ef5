"""Rules at a module's boundary: on every tensor that enters or leaves it."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradpolicy.flow.arguments import Argument
from gradpolicy.flow.autograd_functions import AdoptHistory, insert_rule, may_have_gradient
from gradpolicy.flow.bound_rule import BoundRule
from gradpolicy.flow.containers import classes_that_hide_tensors, map_tensors
from gradpolicy.flow.locations import place_at
from gradpolicy.flow.rule_state import RuleState
from gradpolicy.rules.registry import Call

# What a module got, by the names of its forward's parameters; None where no rule asks.
Arguments = Mapping[str, Any] | None
DueRules = list[tuple[BoundRule, Argument | None]]


class Boundary:
    """The rules at one side of one module.

    Args:
        side: ``"input"`` or ``"output"``.
        module: The module's name.
        states: The rules, in the order in which the gradient meets them.
        arguments: For each rule, the one argument of the forward on which it acts; None means all of them.
    """

    def __init__(
        self, side: str, module: str, states: Sequence[RuleState], arguments: Sequence[Argument | None]
    ) -> None:
        self.module = module
        self.location = location = place_at(side, module)
        # The rule put on last is the first that the gradient meets.
        self.bound_rules = tuple(BoundRule(state, location) for state in reversed(states))
        self.arguments = tuple(reversed(arguments))
        self._has_looked = False

    def enter(
        self, args: tuple, kwargs: dict, crossed: list, arguments: Arguments = None
    ) -> tuple[tuple, dict]:
        """Put the rules between the arguments of a call and their nodes.

        Args:
            args: The positional arguments: tensors in tuples, lists, dicts and dataclasses.
            kwargs: The keyword arguments.
            crossed: Collects the pairs of tensors before and after.
            arguments: What the module got, by name, for rules that ask for the call.
        """
        due = self._due(arguments)
        passed: set[str] = set()
        if all(argument is None for _, argument in due):
            args, kwargs = self._cross((args, kwargs), [rule for rule, _ in due], crossed, passed)
        else:
            args = tuple(
                [self._cross(value, _rules_at(slot, due), crossed, passed) for slot, value in enumerate(args)]
            )
            kwargs = {
                slot: self._cross(value, _rules_at(slot, due), crossed, passed)
                for slot, value in kwargs.items()
            }
        self._note_untouched(due, passed)
        return args, kwargs

    def leave(self, result: Any, arguments: Arguments = None) -> Any:
        """Put the rules between what a module returns and its nodes; see :meth:`enter`."""
        due = self._due(arguments)
        passed: set[str] = set()
        result = self._cross(result, [rule for rule, _ in due], [], passed)
        self._note_untouched(due, passed)
        return result

    def _due(self, arguments: Arguments) -> DueRules:
        """Return the rules that act in this call, each with its argument."""
        due = [
            (rule, argument)
            for rule, argument in zip(self.bound_rules, self.arguments, strict=True)
            if rule.state.is_due(self.location, self.module)
        ]
        if arguments is None:
            return due
        call = Call(self.location, arguments)
        return [(rule.for_call(call) if rule.takes_call else rule, argument) for rule, argument in due]

    def _note_untouched(self, due: DueRules, passed: Collection[str]) -> None:
        for rule, _ in due:
            if rule.state.name not in passed:
                rule.state.note("without_gradient", self.location)

    def _cross(self, values: Any, rules: Sequence[BoundRule], crossed: list, passed: set[str]) -> Any:
        """Put rules on the tensors in some values, and collect the names of their policies."""
        if not rules:
            return values
        put_on = functools.partial(self._put_on, rules, crossed, passed)
        result = map_tensors(put_on, values, may_have_gradient)
        if not torch.compiler.is_compiling() and (result is values or not self._has_looked):
            self._has_looked = True
            self._note_hidden_tensors(values, rules)
        return result

    def _put_on(self, rules: Sequence[BoundRule], crossed: list, passed: set[str], tensor: Tensor) -> Tensor:
        result = tensor
        for bound_rule in rules:
            state = bound_rule.state
            state.note("matched", self.location)
            passed.add(state.name)
            # Under torch.compile a copy costs nothing, and an alias that is written to cannot be traced.
            value = result.clone() if torch.compiler.is_compiling() else result
            result = value.detach() if state.detaches else insert_rule(bound_rule, value)
            if state.detaches:
                state.note_cut(self.location, result)
        crossed.append((tensor, result))
        return result

    def _note_hidden_tensors(self, values: Any, rules: Iterable[BoundRule]) -> None:
        for name in sorted(classes_that_hide_tensors(values)):
            for bound_rule in rules:
                bound_rule.state.note_opaque(
                    f"{name} at {self.location}",
                    "tensors are found in tuples, lists, dicts and dataclasses; those in it pass with the "
                    "plain gradient",
                )


def _rules_at(slot: int | str, due: DueRules) -> list[BoundRule]:
    """Return the rules for one argument of a call."""
    return [rule for rule, argument in due if argument is None or argument.is_at(slot)]


def adopt_writes(crossed: list[tuple[Tensor, Tensor]], versions: list[int]) -> None:
    """Return tensors that a module wrote to through their aliases the history of the aliases.

    Args:
        crossed: The pairs of tensors and aliases.
        versions: The versions of the tensors before the module ran.
    """
    for (tensor, alias), version in zip(crossed, versions, strict=True):
        if tensor._version != version:
            # The values stay, so what was saved of them for the backward pass stays valid.
            with _unsafe_preserve_version_counter(tensor):
                AdoptHistory.apply(tensor, alias)
