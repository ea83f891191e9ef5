"""Rules on the inputs and outputs of modules, and across modules."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradpolicy.errors import nearest
from gradpolicy.flow.arguments import Signature, Slots
from gradpolicy.flow.bound_rule import BoundRule, RuleState
from gradpolicy.flow.containers import classes_that_hide_tensors, map_tensors, replace_at, tensors_in
from gradpolicy.flow.edges import AdoptHistory, insert_rule, join, may_have_gradient, replace
from gradpolicy.flow.locations import location_at
from gradpolicy.flow.policy_report import Outcome
from gradpolicy.flow.tracing import in_transform
from gradpolicy.rules.routing import is_differentiable
from gradpolicy.where import LOCATIONS

# The arguments of a module's forward by parameter name; empty if no rule has a keyword `call`.
Arguments = Mapping[str, Any]
# A module's forward, of its arguments and keyword arguments.
Forward = Callable[[tuple, dict], Any]
# Values by slot: the arguments of a forward by position or name, or its result at position 0.
Values = dict[int | str, Any]
# A rule, and the arguments of the forward on which it acts.
RuleAt = tuple[BoundRule, Slots]


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
        self.module, self.signature = module, signature
        self.takes_call = any(state.rule.takes_call for state in states)
        at: dict[str, list[RuleAt]] = {side: [] for side in LOCATIONS}
        for state in states:
            slots = signature.slots(state.policy.argument, f"policy {state.name!r} at module {module!r}")
            at[state.policy.at].append((BoundRule(state, location_at(state.policy.at, module)), slots))
        # The rule inserted last is the first in the backward pass.
        self.entering, self.leaving, self.through = at["input"][::-1], at["output"][::-1], at["through"]

    def run(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run the module's forward with the rules."""
        arguments: Arguments = {}
        if self.takes_call:
            arguments = self.signature.by_name(*map_tensors(Tensor.detach, (args, kwargs)))
        aliases = Aliases()
        if self.entering:
            values = _cross(self.entering, {**dict(enumerate(args)), **kwargs}, arguments, aliases)
            args = tuple([values.pop(position) for position in range(len(args))])
            kwargs = values
        result = self._run_through(forward, args, kwargs, arguments)
        aliases.adopt_writes()
        return _cross(self.leaving, {0: result}, arguments, Aliases())[0] if self.leaving else result

    def _run_through(self, forward: Forward, args: tuple, kwargs: dict, arguments: Arguments) -> Any:
        """Run the forward, with gradients by rules from its outputs to its input."""
        active = [(rule, slots) for rule, slots in self.through if rule.state.acts_at(rule.location)]
        if not active:
            return forward(args, kwargs)
        cuts = any(rule.state.policy.inside == "own" for rule, _ in active)
        aliases = Aliases()
        fed = map_tensors(lambda each: aliases.add(each, _fed(each, cuts)), (args, kwargs), may_have_gradient)
        result = forward(*fed)
        if aliases.written():
            raise active[0][0].error("writes to its input in place: let it write to a clone (inplace=False)")
        # Rules get the inputs themselves, in the order of the forward's parameters, not of the call.
        given: Values = dict(enumerate(args)) | self.signature.in_order(kwargs)
        ruled: list[Tensor] = []
        for rule, slots in active:
            inputs = tensors_in([given[slot] for slot in given if not slots or slot in slots])
            result = _put_across(rule.for_call(self.module, arguments), inputs, result, ruled)
        if cuts and any(
            one.requires_grad and not any(one is other for other in ruled) for one in tensors_in(result)
        ):
            raise active[0][0].error(
                "has outputs without a rule, whose gradient inside='own' would keep from the inputs; name "
                "them too (output=…), or use inside='none'"
            )
        return result


class Aliases:
    """The tensors that a module does not get, each with the alias that it gets.

    A module may modify its input in place. What uses the tensor afterwards then needs the alias's history.
    """

    def __init__(self) -> None:
        # With the version of the tensor before; under transforms, where there are no versions, empty.
        self.made: list[tuple[Tensor, Tensor, int]] = []

    def add(self, tensor: Tensor, alias: Tensor) -> Tensor:
        """Add an alias of a tensor, and return the alias."""
        if not in_transform():
            self.made.append((tensor, alias, tensor._version))
        return alias

    def written(self) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that were modified in place, with their aliases."""
        return [(tensor, alias) for tensor, alias, version in self.made if tensor._version != version]

    def adopt_writes(self) -> None:
        """Give the tensors that were modified in place the autograd history of their aliases."""
        # An alias of an alias comes first.
        for tensor, alias in reversed(self.written()):
            # The values do not change, so tensors saved for the backward pass remain valid.
            with _unsafe_preserve_version_counter(tensor):
                AdoptHistory.apply(tensor, alias)


def _cross(rules: Iterable[RuleAt], values: Values, arguments: Arguments, aliases: Aliases) -> Values:
    """Return values with rules between their tensors and the tensors' autograd nodes.

    Args:
        rules: The rules; the last is the first in the backward pass.
        values: The values: tensors, also in tuples, lists, dicts and dataclasses.
        arguments: All arguments by parameter name, for rules with a keyword ``call``.
        aliases: To which the tensors and their replacements are added.
    """
    for rule, slots in rules:
        if rule.state.acts_at(rule.location):
            chosen = {slot: value for slot, value in values.items() if not slots or slot in slots}
            values = values | _crossed(rule.for_call(rule.location, arguments), chosen, aliases)
    return values


def _crossed(rule: BoundRule, values: Values, aliases: Aliases) -> Values:
    """Return values with a rule on their tensors."""
    state, location = rule.state, rule.location

    def put_on(tensor: Tensor) -> Tensor:
        state.note(location, Outcome.ACTED)
        return aliases.add(tensor, tensor.detach() if state.policy.detaches else insert_rule(rule, tensor))

    result = map_tensors(put_on, values, may_have_gradient)
    if not any(map(may_have_gradient, tensors_in(values))):
        state.note(location, Outcome.WITHOUT_GRADIENT)
    if not torch.compiler.is_compiling():
        reason = "it is no tuple, list, dict or dataclass; tensors in it pass with the plain gradient"
        for name in sorted(classes_that_hide_tensors(values)):
            state.row.note_opaque(f"{name} at {location}", reason)
    return result


def _fed(tensor: Tensor, cuts: bool) -> Tensor:
    """Return an input for the forward, whose own gradient it does not get."""
    if cuts:
        return tensor.detach()
    # The compiler has no versions, which tell if the forward writes to it. A copy is free in compiled code.
    return tensor.clone() if torch.compiler.is_compiling() else tensor


def _put_across(rule: BoundRule, inputs: Sequence[Tensor], result: Any, ruled: list[Tensor]) -> Any:
    """Attach the gradient of a rule across a module, from the outputs that its policy names to inputs.

    Args:
        rule: The rule.
        inputs: The arguments of the module that get the gradient, not the aliases that its forward got.
        result: The result of the forward.
        ruled: A list to which the outputs with the rule are added.

    Returns:
        The result with these outputs replaced.

    Raises:
        PolicyError: If there is no such output, or none that could have a gradient.
    """
    state, policy = rule.state, rule.state.policy
    keeps_own, others = policy.inside == "own", len(ruled)
    acts = policy.detaches or any(map(may_have_gradient, inputs))
    state.note(rule.location, Outcome.ACTED if acts else Outcome.WITHOUT_GRADIENT)
    if not acts and not keeps_own:
        # The rule is not called, but the path is cut.
        state.note(f"{rule.location}, cut off", Outcome.ACTED)

    def put_on(tensor: Tensor) -> Tensor:
        if policy.detaches:
            found = tensor if keeps_own else tensor.detach()
        else:
            found = replace(rule, tensor.detach(), inputs)
            found = join(tensor, found) if keeps_own and tensor.requires_grad else found
        ruled.append(found)
        return found

    mapped = functools.partial(map_tensors, put_on, where=is_differentiable)
    for key in policy.output:
        try:
            result = replace_at(result, key, mapped)
        except LookupError as error:
            names = list(map(str, error.args[0]))
            kind = "one tensor" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            hint = f"; {nearest(str(key), names)}" if names else ""
            raise rule.error(f"gives {kind} without an output {key!r}{hint}") from None
    result = result if policy.output else mapped(result)
    if len(ruled) == others:
        raise rule.error("gives no floating-point output that could have a gradient")
    return result
