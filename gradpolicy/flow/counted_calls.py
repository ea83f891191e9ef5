"""Which calls of an operation a policy means: they are counted within a module's forward."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gradpolicy.errors import PolicyError
from gradpolicy.flow.operation_rule import OperationRule


class Counting(Protocol):
    """What counts: a mode."""

    counts: dict[str, int]


class CountedCalls:
    """Counts the calls of operations within one module's forward, for policies that name some of them.

    Where such modules lie within each other, a call counts for the innermost one.

    Args:
        module: The module's name.
        rules: The rules for some calls only.
    """

    def __init__(self, module: str, rules: Sequence[OperationRule]) -> None:
        self.module = module
        self.rules = tuple(rules)

    def run(self, mode: Counting, forward: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """Runs the forward, and counts anew.

        Raises:
            PolicyError: If an operation ran less often than a policy says.
        """
        outer = mode.counts
        mode.counts = {**outer, **{rule.key: 0 for rule in self.rules}}
        try:
            result = forward(args, kwargs)
            for rule in self.rules:
                self._check(rule, mode.counts[rule.key])
            return result
        finally:
            mode.counts = outer

    def _check(self, rule: OperationRule, count: int) -> None:
        if rule.state.active and count <= max(rule.calls):
            times = "once" if count == 1 else f"{count} times"
            where = f"module {self.module!r}" if self.module else "the model"
            raise PolicyError(
                f"policy {rule.state.name!r}: operation {rule.name!r} ran {times} in the forward of {where}, "
                f"so there is no call {max(rule.calls)} (calls= counts from 0)"
            )
