"""The places of a policy in a model: which modules, operations and parameters it means."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gradpolicy.flow.operations import Operation, resolve_operation
from gradpolicy.policies import FlowPolicy
from gradpolicy.where import match_modules, match_parameters, plain_name


@dataclass(frozen=True)
class Places:
    """Where a policy acts.

    Args:
        matched: The modules that its patterns match, by name.
        operations: The operations that it is for.
        within: For these: ids of the modules in whose forward it holds.
        side: ``"input"`` or ``"output"`` for a policy at module boundaries, otherwise empty.
        at: For these: ids of the modules.
        parameters: The parameters whose gradients it changes, by name.
    """

    matched: dict[str, nn.Module] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()
    within: frozenset[int] = frozenset()
    side: str = ""
    at: frozenset[int] = frozenset()
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def find_places(model: nn.Module, name: str, policy: FlowPolicy) -> Places:
    """Finds a policy's places in a model.

    Raises:
        PolicyError: If a pattern matches nothing, or an operation does not exist.
    """
    if policy.params:
        return Places(parameters=match_parameters(model, policy.params))
    if not policy.ops:
        matched = match_modules(model, policy.modules)
        return Places(matched, side=policy.at, at=frozenset(map(id, matched.values())))
    operations = tuple(dict.fromkeys(resolve_operation(operation) for operation in policy.ops))
    if not policy.modules:
        within = frozenset(id(module) for module in model.modules())
        return Places({"": model}, operations, within)
    matched = match_modules(model, policy.modules)
    return Places(matched, operations, _within(model, matched, _taken_away(model, policy)))


def place_of(policy: FlowPolicy) -> str:
    """Where a policy acts, as a person writes it: ``ops round in modules encoder.*``."""

    def written(items: Iterable[Any]) -> str:
        return ", ".join(getattr(item, "__name__", str(item)) for item in items)

    if policy.params:
        return f"params {written(policy.params)}"
    modules = f"modules {written(policy.modules)}" if policy.modules else "whole model"
    return f"ops {written(policy.ops)} in {modules}" if policy.ops else f"{policy.at} of {modules}"


def _taken_away(model: nn.Module, policy: FlowPolicy) -> set[str]:
    patterns = [p[1:] for p in policy.modules if isinstance(p, str) and p.startswith("!")]
    return {name for pattern in patterns for name in match_modules(model, pattern)}


def _within(model: nn.Module, matched: dict[str, nn.Module], taken_away: set[str]) -> frozenset[int]:
    """The modules below a matched one, themselves included, without those below one taken away."""
    holds: dict[str, bool] = {}
    found: set[int] = set()
    for raw_name, module in model.named_modules(remove_duplicate=False):
        name = plain_name(raw_name)
        if name not in holds:
            above = holds.get(name.rpartition(".")[0], False) if name else False
            away = name in taken_away or (name != "" and _is_away(name, taken_away))
            holds[name] = not away and (above or name in matched)
        if holds[name]:
            found.add(id(module))
    return frozenset(found)


def _is_away(name: str, taken_away: set[str]) -> bool:
    """Whether a module or one above it was taken away."""
    parts = name.split(".")
    return "" in taken_away or any(".".join(parts[:end]) in taken_away for end in range(1, len(parts) + 1))
