"""Where a policy acts in a model: which modules, operations and parameters it means."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import nn

from gradpolicy.errors import under
from gradpolicy.flow.operations import Operation, resolve_operation
from gradpolicy.rules.registry import Rule
from gradpolicy.when import When
from gradpolicy.where import match_modules, match_parameters, plain_name


@runtime_checkable
class FlowPolicy(Protocol):
    """What flow needs of a policy. The policies themselves are in :mod:`gradpolicy.policies`."""

    @property
    def rule(self) -> Rule:
        """What takes the place of the gradient."""

    @property
    def detaches(self) -> bool:
        """Whether the graph is cut instead of asking the rule."""

    @property
    def modules(self) -> tuple:
        """Globs on qualified names, or module classes."""

    @property
    def ops(self) -> tuple:
        """Names of operations, or torch functions."""

    @property
    def params(self) -> tuple:
        """Globs on parameter names."""

    @property
    def at(self) -> str:
        """``"input"`` or ``"output"``: the side of a module; or ``"through"`` it."""

    @property
    def argument(self) -> int | str | None:
        """The one argument of the forward on which it acts; None means all of them."""

    @property
    def output(self) -> tuple:
        """Indices, keys or attributes of the outputs that it goes through from; none means every one."""

    @property
    def inside(self) -> str:
        """``"none"`` or ``"own"``: what parameters within get where it goes through a module."""

    @property
    def calls(self) -> tuple[int, ...]:
        """The numbers of the calls of each operation or module on which it acts; none means all."""

    @property
    def when(self) -> When:
        """When the policy is active."""


@dataclass(frozen=True)
class Locations:
    """Where a policy acts in a model.

    Args:
        modules: The modules that its patterns match, by name.
        operations: The operations that it names.
        inside: If it names operations: the modules in whose forward it acts, names by id.
        side: ``"input"``, ``"output"`` or ``"through"`` if it acts at modules as a whole, otherwise empty.
        boundaries: If it acts at modules as a whole: their ids.
        parameters: The parameters whose gradients it changes, by name.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()
    inside: dict[int, str] = field(default_factory=dict)
    side: str = ""
    boundaries: frozenset[int] = frozenset()
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def find_locations(model: nn.Module, name: str, policy: FlowPolicy) -> Locations:
    """Finds where a policy acts in a model.

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
    """What messages and counts call a side of a module, or the way through it."""
    return f"module {module!r}, from output to input" if side == "through" else f"{side} of module {module!r}"


def describe_location(policy: FlowPolicy) -> str:
    """Where a policy acts, as a person writes it: ``ops round in modules encoder.*``."""

    def written(items: Iterable[Any]) -> str:
        return ", ".join(getattr(item, "__name__", str(item)) for item in items)

    if policy.params:
        return f"params {written(policy.params)}"
    modules = f"modules {written(policy.modules)}" if policy.modules else "whole model"
    calls = f" (calls {written(policy.calls)})" if policy.calls else ""
    if policy.ops:
        argument = "" if policy.argument is None else f", argument {policy.argument!r},"
        return f"ops {written(policy.ops)}{calls}{argument} in {modules}"
    if policy.at == "through":
        output = f"output {written(policy.output)}" if policy.output else "output"
        return f"{modules}, from {output} to {_input_of(policy)}{calls}"
    return f"{_input_of(policy) if policy.at == 'input' else 'output'} of {modules}{calls}"


def _input_of(policy: FlowPolicy) -> str:
    return "input" if policy.argument is None else f"argument {policy.argument!r}"


def _inside(model: nn.Module, matched: set[str], excluded: set[str]) -> dict[int, str]:
    """The matched modules and those below, without the excluded ones and those below: names by id."""
    found: dict[int, str] = {}
    for raw_name, module in model.named_modules(remove_duplicate=False):
        parts = plain_name(raw_name).split(".") if raw_name else []
        names = {".".join(parts[:end]) for end in range(len(parts) + 1)}
        if names & matched and not names & excluded:
            found.setdefault(id(module), ".".join(parts))
    return found
