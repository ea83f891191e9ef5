"""What stands in a dispatch table."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from gradpolicy.flow.bound_rule import RuleState
from gradpolicy.flow.operation_tables import Function


class TableRule(ABC):
    """Makes some calls of some torch functions in their place.

    Attributes:
        name: The operation's name, for messages and reports.
        functions: The torch functions whose calls it sees.
        state: The rule, and whether it is active.
        calls: The numbers of the calls that it is for, counted within a module's forward; none means all.
        key: Under what its calls are counted.
    """

    name: str
    functions: tuple[Function, ...]
    state: RuleState
    calls: tuple[int, ...] = ()
    key: str = ""

    @abstractmethod
    def covers(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether it makes this call."""

    @abstractmethod
    def allows_plain_recomputation(self) -> bool:
        """Whether a checkpoint may run the call again without it."""

    @abstractmethod
    def call(self, function: Function, args: tuple, kwargs: Mapping[str, Any], module: str | None) -> Any:
        """Makes the call.

        Args:
            function: The torch function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            module: The module in whose forward it runs, for messages.
        """
