"""Makes ``torch.compile`` hand over to modes every call that eager mode hands over to them.

The compiler goes by a list of its own. Functions in place (``torch.relu_``), ``F.sigmoid`` and ``F.tanh`` are
not on it, nor are functions that a user wrote, and the built-in ``abs`` it never hands over. Without this the
rules on them would be ignored in compiled code.
"""

import importlib
import sys
import types
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_overridable_functions

from gradpolicy.flow.bound_rule import runs_while_tracing
from gradpolicy.flow.operation_tables import Function

# The operators of tensors that are written in Python, such as that of 1 - x, by their identity.
_OPERATORS = {
    str(id(function)): function
    for name, function in vars(Tensor).items()
    if name.startswith("__") and isinstance(function, types.FunctionType)
}


def show_to_compiler(functions: Collection[Function]) -> None:
    """Has the compiler hand calls of these functions over to modes."""
    known = get_overridable_functions()["gradpolicy"]
    known.extend(set(functions).difference(known))
    in_python = [function for function in functions if isinstance(function, types.FunctionType)]
    if torch.abs in functions or not all(one.__module__.startswith("torch.") for one in in_python):
        importlib.import_module("torch._dynamo")
    if "torch._dynamo" not in sys.modules:
        # It will read the list when it is imported.
        return
    from torch._dynamo.trace_rules import lookup
    from torch._dynamo.variables import UserFunctionVariable
    from torch._dynamo.variables.torch import get_overridable_functions as known_to_compiler

    known_to_compiler().update(functions)
    _show_builtin_abs()
    for function in in_python:
        if lookup(function) is UserFunctionVariable:
            # The compiler would look into it, and hand over what it calls.
            torch.compiler.allow_in_graph(function)


def as_in_tables(function: Function) -> Function:
    """Returns a function that the compiler handed over as one that it finds in dicts.

    It does not find the operators that are written in Python.
    """
    return _OPERATORS.get(_identity(function), function)


@runs_while_tracing
def _identity(function: Function) -> str:
    return str(id(function))


def _show_builtin_abs() -> None:
    from torch._dynamo.variables.builder import SourcelessBuilder
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch_function import can_dispatch_torch_function, dispatch_torch_function

    original = getattr(TensorVariable, "nb_absolute_impl", None)
    if original is None or original.__module__ == __name__:
        return

    def nb_absolute_impl(self: Any, tx: Any) -> Any:
        if can_dispatch_torch_function(tx, (self,), {}):
            return dispatch_torch_function(tx, SourcelessBuilder.create(tx, Tensor.abs), (self,), {})
        return original(self, tx)

    TensorVariable.nb_absolute_impl = nb_absolute_impl  # type: ignore[method-assign]
