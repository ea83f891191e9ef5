"""Calls that hold operations which no override can reach: what they hide, and the word about it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gradpolicy.flow.bound_rule import Binding
from gradpolicy.flow.operations import Function, Operation

_ATTENTION = frozenset({"softmax", "dropout", "matmul", "linear"})
_GATES = frozenset({"sigmoid", "tanh"})

# One call of these runs the operations named within torch, where no torch function is seen.
_HIDING: dict[Function, frozenset[str]] = {
    F.multi_head_attention_forward: _ATTENTION,
    F.scaled_dot_product_attention: _ATTENTION - {"linear"},
    F.gumbel_softmax: frozenset({"softmax", "argmax_one_hot"}),
    F.lp_pool1d: frozenset({"relu", "sign", "abs"}),
    F.lp_pool2d: frozenset({"relu", "sign", "abs"}),
    F.lp_pool3d: frozenset({"relu", "sign", "abs"}),
    F.softmin: frozenset({"softmax"}),
    F.tanhshrink: frozenset({"tanh"}),
    torch.lstm: _GATES,
    torch.lstm_cell: _GATES,
    torch.gru: _GATES,
    torch.gru_cell: _GATES,
    torch.rnn_tanh: frozenset({"tanh"}),
    torch.rnn_tanh_cell: frozenset({"tanh"}),
    torch.rnn_relu: frozenset({"relu"}),
    torch.rnn_relu_cell: frozenset({"relu"}),
}


class UnseenCall:
    """Notes calls that hide operations which a rule is for, and lets them run as ever.

    Args:
        function: The function called.
        hidden: Names of the rule's operations that it may run within.
        binding: The rule.
    """

    def __init__(self, function: Function, hidden: frozenset[str], binding: Binding) -> None:
        self.name = function.__name__
        self.functions = (function,)
        self.reason = f"it runs {', '.join(sorted(hidden))} within torch, with the plain gradient"
        self.binding = binding

    def covers(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether the rule holds now."""
        return self.binding.active

    def keeps_what_plain_keeps(self) -> bool:
        """Whether a plain second run by a checkpoint makes no difference: always, nothing is changed here."""
        return True

    def call(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Does the call; says once what could not be reached."""
        if torch.is_grad_enabled():
            self.binding.note_unseen(self.name, self.reason)
        return function(*args, **kwargs)


def unseen_calls(operations: Iterable[Operation], binding: Binding) -> list[UnseenCall]:
    """The calls that may hide some of a rule's operations."""
    names = {operation.name for operation in operations}
    own = {function for operation in operations for function in operation.functions}
    return [
        UnseenCall(function, hidden & names, binding)
        for function, hidden in _HIDING.items()
        if hidden & names and function not in own
    ]


def note_script_modules(
    scripts: Iterable[tuple[str, nn.Module]], within: frozenset[int], binding: Binding
) -> None:
    """Notes the ScriptModules in which a rule would hold, the outermost: their operations run outside Python.

    Args:
        scripts: The ScriptModules of a model, each before those within it.
        within: Ids of the modules in which the rule holds.
        binding: The rule.
    """
    noted: list[str] = []
    for name, module in scripts:
        if id(module) in within and not any(name.startswith(f"{outer}.") for outer in noted):
            noted.append(name)
            binding.note_unseen(f"ScriptModule {name!r}", "its operations run outside Python")
