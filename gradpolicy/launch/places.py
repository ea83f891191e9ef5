"""Checks where policies act against the model, so that a message names the config key."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from gradpolicy.errors import PolicyError
from gradpolicy.flow.operations import resolve_operation
from gradpolicy.policies import FlowPolicy, Freeze, Policy
from gradpolicy.where import match_modules, match_parameters


def check_places(model: nn.Module, policies: Mapping[str, Policy]) -> None:
    """Looks for everything that the policies name.

    Raises:
        PolicyError: Under its key, for a pattern that matches nothing or an operation that does not exist.
    """
    for name, policy in policies.items():
        for argument, check in _checks(model, policy):
            with _under(f"policy.{name}.{argument}"):
                check()


def _checks(model: nn.Module, policy: Policy) -> Iterator[tuple[str, Callable[[], object]]]:
    if isinstance(policy, Freeze | FlowPolicy) and policy.params:
        yield "params", lambda: match_parameters(model, policy.params)
    if isinstance(policy, FlowPolicy) and policy.modules:
        yield "modules", lambda: match_modules(model, policy.modules)
    if isinstance(policy, FlowPolicy) and policy.ops:
        yield (
            "ops",
            lambda: [resolve_operation(operation.removeprefix("!")) for operation in _texts(policy.ops)],
        )


def _texts(operations: tuple) -> list[str]:
    return [operation for operation in operations if isinstance(operation, str)]


@contextmanager
def _under(key: str) -> Iterator[None]:
    try:
        yield
    except PolicyError as error:
        raise PolicyError(f"{key}: {error}") from error
