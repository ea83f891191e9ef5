"""The modules, operations and parameters on which a policy acts, and what contradicts them."""

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradpolicy.errors import PolicyError, under
from gradpolicy.flow.operations import Operation, resolve_operation
from gradpolicy.rules.registry import Rule
from gradpolicy.when import When
from gradpolicy.where import STEP_OPERATIONS, match_modules, match_parameters, plain_name

# Modules whose class says nothing about what they run.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Rules that are meaningless where input and output are the same tensor.
_OF_AN_OPERATION = ("identity", "bernoulli", "gumbel", "lsq", "reinmax", "rotation")


class RulePlacement:
    """A rule and its location; see :class:`gradpolicy.policies.FlowPolicy`."""

    rule: Rule
    # True if the graph is cut instead of calling the rule.
    detaches: bool = False
    modules: tuple = ()
    ops: tuple = ()
    params: tuple = ()
    at: str = ""
    argument: tuple[int | str, ...] = ()
    output: tuple = ()
    inside: str = "none"
    calls: tuple[int, ...] = ()
    when: When = When()
    # With ``ops``, of which one is enough: a part of the class names of modules that should each run one.
    kin: str = ""


@dataclass(frozen=True)
class Locations:
    """The locations of a policy in a model, by names and ids, so that reports do not hold the model.

    Args:
        modules: The ids of the modules that match the policy's patterns, by name.
        operations: The policy's operations.
        inside: For a policy on operations, the names of the modules in whose forward it acts, by id.
        boundaries: For a policy on modules, their names by id.
        parameters: For a policy on parameters, their ids by name.
        each: For a policy on operations, the modules that should run one of them: with None those that it
            names, or a class or ``*.mlp`` matches; with their class those that an open glob (``layers.*``)
            matches, which should if another of that class does.
        kind: What the policy acts on: ``"operation"``, ``"module"`` or ``"parameter"``.
        expected: The operations or locations where the rule should act: True for those that the policy names,
            False if one of several is enough.
    """

    modules: dict[str, int] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()
    inside: dict[int, str] = field(default_factory=dict)
    boundaries: dict[int, str] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    each: dict[str, type | None] = field(default_factory=dict)
    kind: str = "operation"
    expected: dict[str, bool] = field(default_factory=dict)


def find_locations(model: nn.Module, name: str, policy: RulePlacement) -> Locations:
    """Return the locations of a policy in a model.

    Args:
        model: The model.
        name: The policy's name, for messages.
        policy: The policy.

    Raises:
        PolicyError: If a pattern matches nothing, or an operation does not exist.
    """
    if policy.params:
        with under(f"policy.{name}.params"):
            parameters = match_parameters(model, policy.params)
        expected = {f"parameter {each!r}": each in policy.params for each in parameters}
        ids = {each: id(parameter) for each, parameter in parameters.items()}
        return Locations(parameters=ids, kind="parameter", expected=expected)
    with under(f"policy.{name}.ops"):
        operations = tuple(dict.fromkeys(resolve_operation(operation) for operation in policy.ops))
    with under(f"policy.{name}.modules"):
        modules = match_modules(model, policy.modules) if policy.modules else {"": model}
    ids = {each: id(module) for each, module in modules.items()}
    if not policy.ops:
        first = {id(module): plain_name(name) for name, module in model.named_modules()}
        boundaries = {key: first[key] for key in ids.values()}
        return Locations(
            ids, boundaries=boundaries, kind="module", expected=_at_modules(policy, modules, first)
        )
    apart = [p for p in policy.modules if isinstance(p, str) and p.startswith("!")]
    excluded = {name for pattern in apart for name in match_modules(model, pattern[1:])}
    closed = [p for p in policy.modules if not (isinstance(p, str) and p.endswith("*")) and p not in apart]
    named = {name for pattern in closed for name in match_modules(model, pattern)}
    inside = _inside(model, set(modules), excluded)
    each = {
        name: None if name in named else type(module)
        for name, module in modules.items()
        if name in named or not isinstance(module, _CONTAINERS)
    }
    for module in model.modules():
        if policy.kin and id(module) in inside and policy.kin in type(module).__name__.lower():
            each[inside[id(module)]] = None
    are_named = not policy.kin and policy.ops != STEP_OPERATIONS
    expected = dict.fromkeys([operation.name for operation in operations], are_named)
    return Locations(ids, operations, inside, each=each, expected=expected)


def _at_modules(
    policy: RulePlacement, modules: Mapping[str, nn.Module], names: Mapping[int, str]
) -> dict[str, bool]:
    """Return the locations of a policy at modules, True for those that it names."""
    named = [modules[pattern] for pattern in policy.modules if pattern in modules]
    running = [module for module in modules.values() if not isinstance(module, torch.jit.ScriptModule)]
    # A glob that matches a ModuleList, which has no forward, matches its modules too.
    forwards = [each for each in running if each in named or type(each).forward is not nn.Module.forward]
    return {location_at(policy.at, names[id(each)]): each in named for each in forwards or running}


def location_at(side: str, module: str) -> str:
    """Return the name of a side of a module, or of the path across it, for messages and counts."""
    return f"module {module!r}, from output to input" if side == "through" else f"{side} of module {module!r}"


def describe_location(policy: RulePlacement) -> str:
    """Describe the location of a policy, such as ``ops round in modules encoder.*``."""

    def written(items: Iterable[Any]) -> str:
        return ", ".join(getattr(item, "__name__", str(item)) for item in items)

    if policy.params:
        return f"params {written(policy.params)}"
    modules = f"modules {written(policy.modules)}" if policy.modules else "the model"
    calls = f" (calls {written(policy.calls)})" if policy.calls else ""
    argument = f"argument{'s' * (len(policy.argument) > 1)} {', '.join(map(repr, policy.argument))}"
    argument = argument if policy.argument else "input"
    if policy.ops:
        of_argument = f", {argument}," if policy.argument else ""
        return f"ops {written(policy.ops)}{calls}{of_argument} in {modules}"
    output = f"output {written(policy.output)}" if policy.output else "output"
    if policy.at == "through":
        return f"{modules}, from {output} to {argument}"
    return f"{argument if policy.at == 'input' else output} of {modules}"


def _inside(model: nn.Module, matched: set[str], excluded: set[str]) -> dict[int, str]:
    """Return the names by id of matched modules and their submodules, without the excluded ones."""
    found: dict[int, str] = {}
    for raw_name, module in model.named_modules(remove_duplicate=False):
        name = plain_name(raw_name)
        if is_below(name, matched) and not is_below(name, excluded):
            found.setdefault(id(module), name)
    return found


def is_below(name: str, names: Collection[str]) -> bool:
    """Return True if a module, or one that contains it, has one of these names."""
    parts = name.split(".") if name else []
    return any(".".join(parts[:end]) in names for end in range(len(parts) + 1))


# ---- contradictions, meaningless locations


def check_policies(policies: Mapping[str, RulePlacement], locations: Mapping[str, Locations]) -> None:
    """Check policies that are installed together.

    Raises:
        PolicyError: For two rules on one operation in a module; for a stop together with another policy at a
            side of a module or on a parameter; for a rule that is meaningless outside of an operation.
    """
    for name, policy in policies.items():
        _check_rule(name, policy)
    for first, second in itertools.combinations(policies, 2):
        one, other = policies[first], policies[second]
        if not _are_ever_active_together(one.when, other.when):
            continue
        if conflict := _conflict((first, second), one, other, locations[first], locations[second]):
            raise PolicyError(f"policies {first!r} and {second!r} {conflict}; {APART}")


def remarks(policies: Mapping[str, RulePlacement]) -> list[str]:
    """Return a line for each policy that scales the gradient of an operation which has none."""
    return [
        f"{name}: the own gradient of {operation!r} is 0, so that there is nothing to change; "
        "StraightThrough(ops=[…]) replaces it"
        for name, policy in policies.items()
        if policy.ops and policy.rule.own and policy.rule.each
        for operation in [resolve_operation(operation).name for operation in policy.ops]
        if operation in STEP_OPERATIONS
    ]


def _check_rule(name: str, policy: RulePlacement) -> None:
    """Check that a rule which needs an operation's input and output is not at a boundary or parameter."""
    rule = policy.rule.name
    if policy.ops or policy.at == "through" or rule not in _OF_AN_OPERATION:
        return
    raise PolicyError(
        f"policy {name!r}: rule {rule!r} is for an operation's input and output, and at "
        f"{describe_location(policy)} both are the one tensor that passes; name the operation (ops=[…]), go "
        f"through the module (at='through'), or call gradpolicy.apply({rule!r}, forward, …)"
    )


# The advice for two policies at the same location.
APART = (
    "leave one of them out, or give them different modules, ops, arguments, outputs, calls or times (when)"
)


def _conflict(
    names: tuple[str, str], one: RulePlacement, other: RulePlacement, here: Locations, there: Locations
) -> str:
    """Return the location at which two policies contradict each other, in words; empty if there is none."""
    apart = _name_other_arguments(one, other)
    operations = [operation.name for operation in here.operations if operation in there.operations]
    inside = [name for module, name in here.inside.items() if module in there.inside]
    if operations and inside:
        # Only a rule that changes an argument's own gradient leaves the gradients of the others as they are.
        composes = apart and one.rule.own and other.rule.own
        where = f"module {inside[0]!r}" if inside[0] else "the model"
        conflicts = _overlap(one.calls, other.calls) and not composes
        return f"both have a rule for operation {operations[0]!r} in {where}" if conflicts else ""
    both = here.boundaries.keys() & there.boundaries if one.at == other.at else ()
    modules = [name for name, module in here.modules.items() if module in both]
    if modules and one.at == "through":
        conflicts = _overlap(one.output, other.output)
        return f"both make the gradient through module {modules[0]!r}" if conflicts else ""
    shared = [] if apart else [f"the {one.at} of module {name!r}" for name in modules]
    shared += [f"parameter {name!r}" for name in here.parameters if name in there.parameters]
    stops = [name for name, policy in zip(names, (one, other), strict=True) if policy.rule.name == "stop"]
    if not (shared and stops):
        return ""
    return f"contradict each other at {shared[0]}: {stops[0]!r} stops the gradient"


def _name_other_arguments(one: RulePlacement, other: RulePlacement) -> bool:
    """Return True if both policies name arguments, in the same way, and none of them twice."""
    kinds = {type(argument) for argument in (*one.argument, *other.argument)}
    return len(kinds) == 1 and not _overlap(one.argument, other.argument)


def _are_ever_active_together(one: When, other: When) -> bool:
    shared = set(one.phases) & set(other.phases)
    return bool(shared) and (shared != {"fit"} or one.overlaps(other))


def _overlap(one: Collection, other: Collection) -> bool:
    """Return True if two choices have one in common; an empty choice means all."""
    return not one or not other or bool(set(one) & set(other))
