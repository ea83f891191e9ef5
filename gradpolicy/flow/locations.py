"""The modules, operations and parameters on which a policy acts."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gradpolicy.errors import under
from gradpolicy.flow.operations import Operation, resolve_operation
from gradpolicy.rules.registry import Rule
from gradpolicy.when import When
from gradpolicy.where import match_modules, match_parameters, plain_name


class RulePlacement:
    """A rule and its location; see :class:`gradpolicy.policies.FlowPolicy`."""

    rule: Rule
    # True if the graph is cut instead of calling the rule.
    detaches: bool = False
    modules: tuple
    ops: tuple
    params: tuple
    at: str
    argument: tuple[int | str, ...]
    output: tuple
    inside: str
    calls: tuple[int, ...]
    when: When


@dataclass(frozen=True)
class Locations:
    """The locations of a policy in a model.

    Args:
        modules: The modules that match the policy's patterns, by name.
        operations: The policy's operations.
        inside: For a policy on operations, the names of the modules in whose forward it acts, by id.
        side: For a policy on modules, ``"input"``, ``"output"`` or ``"through"``; otherwise empty.
        boundaries: For a policy on modules, their ids.
        parameters: For a policy on parameters, the parameters by name.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()
    inside: dict[int, str] = field(default_factory=dict)
    side: str = ""
    boundaries: frozenset[int] = frozenset()
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


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
            return Locations(parameters=match_parameters(model, policy.params))
    with under(f"policy.{name}.ops"):
        operations = tuple(dict.fromkeys(resolve_operation(operation) for operation in policy.ops))
    if not policy.modules:
        return Locations({"": model}, operations, _inside(model, {""}, set()))
    with under(f"policy.{name}.modules"):
        modules = match_modules(model, policy.modules)
    if not policy.ops:
        return Locations(modules, side=policy.at, boundaries=frozenset(map(id, modules.values())))
    patterns = [p[1:] for p in policy.modules if isinstance(p, str) and p.startswith("!")]
    excluded = {name for pattern in patterns for name in match_modules(model, pattern)}
    return Locations(modules, operations, _inside(model, set(modules), excluded))


def place_at(side: str, module: str) -> str:
    """Return the name of a side of a module, or of the path across it, for messages and counts."""
    return f"module {module!r}, from output to input" if side == "through" else f"{side} of module {module!r}"


def describe_location(policy: RulePlacement) -> str:
    """Describe the location of a policy, such as ``ops round in modules encoder.*``."""

    def written(items: Iterable[Any]) -> str:
        return ", ".join(getattr(item, "__name__", str(item)) for item in items)

    if policy.params:
        return f"params {written(policy.params)}"
    modules = f"modules {written(policy.modules)}" if policy.modules else "whole model"
    calls = f" (calls {written(policy.calls)})" if policy.calls else ""
    if policy.ops:
        argument = f", {_arguments_of(policy)}," if policy.argument else ""
        return f"ops {written(policy.ops)}{calls}{argument} in {modules}"
    if policy.at == "through":
        output = f"output {written(policy.output)}" if policy.output else "output"
        return f"{modules}, from {output} to {_input_of(policy)}"
    return f"{_input_of(policy) if policy.at == 'input' else 'output'} of {modules}"


def _input_of(policy: RulePlacement) -> str:
    return _arguments_of(policy) if policy.argument else "input"


def _arguments_of(policy: RulePlacement) -> str:
    return f"argument{'s' * (len(policy.argument) > 1)} {', '.join(map(repr, policy.argument))}"


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
