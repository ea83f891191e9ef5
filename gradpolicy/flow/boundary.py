"""Rules on the inputs and outputs of modules, and across modules."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradpolicy.errors import PolicyError, nearest
from gradpolicy.flow.arguments import Signature, Slots
from gradpolicy.flow.bound_rule import BoundRule, RuleState
from gradpolicy.flow.containers import classes_that_hide_tensors, map_tensors, replace_at, tensors_in
from gradpolicy.flow.edges import AdoptHistory, alias_of, insert_rule, join, may_have_gradient, replace
from gradpolicy.flow.locations import location_at
from gradpolicy.flow.policy_report import Outcome
from gradpolicy.flow.tracing import in_transform
from gradpolicy.rules.routing import is_differentiable
from gradpolicy.where import LOCATIONS

# The arguments of a module's forward by parameter name; empty if no rule has a keyword `call`.
Arguments = Mapping[str, Any]
# A module's forward, of its arguments and keyword arguments.
Forward = Callable[[tuple, dict], Any]
# A rule, and the arguments of the forward on which it acts.
RuleAt = tuple[BoundRule, Slots]
# Pairs of each tensor and its replacement.
Crossed = list[tuple[Tensor, Tensor]]


class Boundary:
    """The rules on the input or output of a module.

    Args:
        rules: The rules in the order in which the backward pass applies them.
    """

    def __init__(self, rules: Sequence[RuleAt]) -> None:
        # The rule inserted last is the first in the backward pass.
        self.rules = rules[::-1]
        self._has_searched = False

    def cross(
        self, values: dict[int | str, Any], crossed: Crossed, arguments: Arguments
    ) -> dict[int | str, Any]:
        """Return values with the rules between their tensors and the tensors' autograd nodes.

        Args:
            values: The arguments of the forward by position or name, or its result at position 0: tensors,
                also in tuples, lists, dicts and dataclasses.
            crossed: A list to which pairs of each tensor and its replacement are added.
            arguments: All arguments by parameter name, for rules with a keyword ``call``.
        """
        due = [
            (rule.for_call(rule.location, arguments), chosen)
            for rule, chosen in self.rules
            if rule.state.acts_at(rule.location)
        ]
        passed: set[str] = set()
        result = {}
        for slot, value in values.items():
            rules = [rule for rule, chosen in due if not chosen or slot in chosen]
            result[slot] = self._cross(value, rules, crossed, passed) if rules else value
        for rule, _ in due:
            if rule.state.name not in passed:
                rule.state.note(rule.location, Outcome.WITHOUT_GRADIENT)
        return result

    def _cross(self, values: Any, rules: Sequence[BoundRule], crossed: Crossed, passed: set[str]) -> Any:
        """Return values with rules on their tensors, and add the policies' names to ``passed``."""

        def put_on(tensor: Tensor) -> Tensor:
            result = tensor
            for bound_rule in rules:
                state = bound_rule.state
                state.note(bound_rule.location, Outcome.ACTED)
                passed.add(state.name)
                result = result.detach() if state.policy.detaches else insert_rule(bound_rule, result)
            crossed.append((tensor, result))
            return result

        result = map_tensors(put_on, values, may_have_gradient)
        if not torch.compiler.is_compiling() and (result is values or not self._has_searched):
            self._has_searched = True
            reason = "it is no tuple, list, dict or dataclass; tensors in it pass with the plain gradient"
            for name in sorted(classes_that_hide_tensors(values)):
                for bound_rule in rules:
                    bound_rule.state.row.note_opaque(f"{name} at {bound_rule.location}", reason)
        return result


def versions_of(crossed: Crossed) -> list[int]:
    """Return the versions of tensors that have an alias; under transforms they are not available."""
    return [] if in_transform() else [tensor._version for tensor, _ in crossed]


def adopt_writes(crossed: Crossed, versions: list[int]) -> None:
    """Give tensors that a module modified in place the autograd history of their aliases.

    Args:
        crossed: Pairs of each tensor and its alias.
        versions: The versions of the tensors before the module ran; none under transforms.
    """
    for (tensor, alias), version in zip(crossed, versions, strict=False):
        if tensor._version != version:
            # The values do not change, so tensors saved for the backward pass remain valid.
            with _unsafe_preserve_version_counter(tensor):
                AdoptHistory.apply(tensor, alias)


class ThroughRule:
    """The rule of a policy across a module.

    Args:
        bound_rule: The rule.
        slots: The arguments that get the gradient.
        module: The module's name.
        signature: The signature of the module's forward.
    """

    def __init__(self, bound_rule: BoundRule, slots: Slots, module: str, signature: Signature) -> None:
        self.bound_rule, self.slots, self.module, self.signature = bound_rule, slots, module, signature
        self.state, policy = bound_rule.state, bound_rule.state.policy
        self.detaches, self.keeps_own = policy.detaches, policy.inside == "own"

    def put_on(
        self, result: Any, args: tuple, kwargs: dict, arguments: Arguments
    ) -> tuple[Any, list[Tensor]]:
        """Attach the rule's gradient, from the chosen outputs to the inputs.

        Args:
            result: The result of the forward.
            args: The positional arguments of the module, not the aliases that its forward got.
            kwargs: The keyword arguments of the module.
            arguments: All arguments by parameter name, for rules with a keyword ``call``.

        Returns:
            The result with its chosen outputs replaced, and the replacements.
        """
        # Rules get the inputs in the order of the forward's parameters, not of the call.
        given: dict[int | str, Any] = dict(enumerate(args)) | self.signature.in_order(kwargs)
        inputs = tensors_in([given[slot] for slot in given if not self.slots or slot in self.slots])
        self._note(inputs)
        bound_rule = self.bound_rule.for_call(self.module, arguments)
        replaced: list[Tensor] = []

        def put_on(tensor: Tensor) -> Tensor:
            replaced.append(self._replaced(tensor, inputs, bound_rule))
            return replaced[-1]

        result = self._map_outputs(result, put_on)
        if not replaced:
            raise self.error("gives no floating-point output that could have a gradient")
        return result, replaced

    def _note(self, inputs: Iterable[Tensor]) -> None:
        """Record the call. If no input requires a gradient, the rule is not called, but the path is cut."""
        location = self.bound_rule.location
        acts = self.detaches or any(may_have_gradient(tensor) for tensor in inputs)
        self.state.note(location, Outcome.ACTED if acts else Outcome.WITHOUT_GRADIENT)
        if not acts and not self.keeps_own:
            self.state.note(f"{location}, cut off", Outcome.ACTED)

    def _map_outputs(self, result: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Return a result with the tensors in the policy's outputs replaced.

        Raises:
            PolicyError: If the result has no such output.
        """
        mapped = functools.partial(map_tensors, change, where=is_differentiable)
        if not self.state.policy.output:
            return mapped(result)
        for key in self.state.policy.output:
            try:
                result = replace_at(result, key, mapped)
            except LookupError as error:
                names = list(map(str, error.args[0]))
                kind = "one tensor" if isinstance(result, Tensor) else f"a {type(result).__name__}"
                hint = f"; {nearest(str(key), names)}" if names else ""
                raise self.error(f"gives {kind} without an output {key!r}{hint}") from None
        return result

    def _replaced(self, tensor: Tensor, inputs: list[Tensor], bound_rule: BoundRule) -> Tensor:
        if self.detaches:
            return tensor if self.keeps_own else tensor.detach()
        ruled = replace(bound_rule, tensor.detach(), inputs)
        return join(tensor, ruled) if self.keeps_own and tensor.requires_grad else ruled

    def error(self, text: str) -> PolicyError:
        """Return an error that names the policy and the module."""
        return PolicyError(f"policy {self.state.name!r}: module {self.module!r}: {text}")


class ModuleRules:
    """The rules at the input and output of a module, and across it.

    Args:
        module: The module's name.
        signature: The signature of its forward.
        states: The rules, in the order in which the backward pass applies them.

    Raises:
        PolicyError: If the forward lacks an argument that a policy names.
    """

    def __init__(self, module: str, signature: Signature, states: Sequence[RuleState]) -> None:
        self.signature = signature
        self.takes_call = any(state.rule.takes_call for state in states)
        at: dict[str, list[RuleAt]] = {side: [] for side in LOCATIONS}
        for state in states:
            bound_rule = BoundRule(state, location_at(state.policy.at, module))
            slots = signature.slots(state.policy.argument, f"policy {state.name!r} at module {module!r}")
            at[state.policy.at].append((bound_rule, slots))
        self.entering, self.leaving = Boundary(at["input"]), Boundary(at["output"])
        self.through = [ThroughRule(*rule, module, signature) for rule in at["through"]]

    def run(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run the module's forward with the rules."""
        arguments: Arguments = {}
        if self.takes_call:
            arguments = self.signature.by_name(*map_tensors(Tensor.detach, (args, kwargs)))
        crossed: Crossed = []
        if self.entering.rules:
            values = self.entering.cross({**dict(enumerate(args)), **kwargs}, crossed, arguments)
            args = tuple([values.pop(position) for position in range(len(args))])
            kwargs = values
        versions = versions_of(crossed)
        if self.through:
            result = self._run_through(forward, args, kwargs, arguments)
        else:
            result = forward(args, kwargs)
        adopt_writes(crossed, versions)
        return self.leaving.cross({0: result}, [], arguments)[0] if self.leaving.rules else result

    def _run_through(self, forward: Forward, args: tuple, kwargs: dict, arguments: Arguments) -> Any:
        """Run the forward, with gradients by rules from its outputs to its input."""
        active = [rule for rule in self.through if rule.state.acts_at(rule.bound_rule.location)]
        if not active:
            return forward(args, kwargs)
        cuts = any(rule.keeps_own for rule in active)
        fed: Crossed = []

        def feed(tensor: Tensor) -> Tensor:
            fed.append((tensor, _fed(tensor, cuts)))
            return fed[-1][1]

        inner_args, inner_kwargs = map_tensors(feed, (args, kwargs), may_have_gradient)
        versions = versions_of(fed)
        result = forward(inner_args, inner_kwargs)
        ruled: list[Tensor] = []
        for rule in active:
            result, replaced = rule.put_on(result, args, kwargs, arguments)
            ruled += replaced
        if not cuts:
            adopt_writes(fed, versions)
            return result
        if any(one.requires_grad and not any(one is other for other in ruled) for one in tensors_in(result)):
            raise active[0].error(
                "has outputs without a rule, whose gradient inside='own' would keep from the inputs; name "
                "them too (output=…), or use inside='none'"
            )
        if versions != versions_of(fed):
            raise active[0].error("writes to its input in place, which inside='own' does not allow")
        return result


def _fed(tensor: Tensor, cuts: bool) -> Tensor:
    """Return an alias of an input, which the forward may modify in place; optionally stop its gradient."""
    if not in_transform():
        return alias_of(tensor, cut=cuts)
    if cuts:
        return tensor.detach()
    # The compiler cannot trace in-place changes of an alias. A copy is free in compiled code.
    return tensor.clone() if torch.compiler.is_compiling() else tensor
