"""The call that a rule is asked about: which operation, with which arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call of an operation, for rules with a keyword ``call``.

    Args:
        operation: The operation's name, such as ``"softmax"``, whatever the spelling of the call. For
            :func:`gradpolicy.apply` the name of the forward, across a module that module's, at its input or
            output ``"input of module 'head'"``.
        arguments: Everything that the call was given, and the defaults of what it was not, by the name of the
            parameter. The first tensor of a torch operation is ``"input"``.
    """

    operation: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
