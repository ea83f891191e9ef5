"""The state of torch around a call: compiled, transformed, under modes or checkpoints.

All private parts of torch's compiler that the package uses are in this file, as they are in torch 2.11 to
2.15. Under another version modules with policies on operations run in eager mode within compiled code.
"""

import functools
import importlib
import itertools
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import get_overridable_functions
from torch.utils.checkpoint import checkpoint

from gradpolicy.errors import warn_user

# A torch function, as a TorchFunctionMode gets it.
Function = Callable[..., Any]
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

COMPILER_IS_KNOWN = torch.__version__.startswith(("2.11.", "2.12.", "2.13.", "2.14.", "2.15."))

# Local names save the attribute lookup at every call. Both are True in compiled code, is_compiling also in
# non-strict export.
is_compiling = torch.compiler.is_compiling
is_traced = torch.compiler.is_dynamo_compiling
without_modes = torch._C.DisableTorchFunction
in_functorch = torch._C._are_functorch_transforms_active
# The number of the running backward pass; -1 outside of one.
graph_task = torch._C._current_graph_task_id
mode_count = torch._C._len_torch_function_stack
mode_at = torch._C._get_function_stack_at
hooks_on_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks

# The module and the name of the function that checkpoints.
CHECKPOINT = (checkpoint.__module__, checkpoint.__qualname__)
# The module that enters policies again.
_ENTRY = "gradpolicy.flow.wrapped_forward"
# The operators of tensors that are written in Python, such as `__rsub__`, by their id.
_OPERATORS = {
    str(id(function)): function
    for name, function in vars(Tensor).items()
    if name.startswith("__") and isinstance(function, types.FunctionType)
}


def runs_while_tracing(function: AnyFunction) -> AnyFunction:
    """Mark a function or method that ``torch.compile`` runs while it traces, with constants as arguments.

    This is ``torch.compiler.assume_constant_result`` without the import of the compiler.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def skip_alone(function: AnyFunction) -> AnyFunction:
    """Mark a function that the compiler traces only as part of its caller.

    If a caller cannot be compiled, the compiler compiles its callees separately, and a test for compiled code
    in them would be True.
    """
    if not COMPILER_IS_KNOWN:
        return function
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def eager_if_unknown(function: AnyFunction) -> AnyFunction:
    """Mark a function that compiled code runs in eager mode if the compiler's version is not known."""
    return function if COMPILER_IS_KNOWN else cast(AnyFunction, torch.compiler.disable(function))


@runs_while_tracing
@skip_alone
def is_exporting() -> bool:
    """Return True during ``torch.export``; the compiler of torch 2.11 takes torch's own function as True."""
    return torch.compiler.is_exporting()


@skip_alone
def in_transform() -> bool:
    """Return True under torch.compile, torch.func or forward mode, where autograd nodes are inaccessible."""
    return is_compiling() or in_functorch() or forward_ad._current_level >= 0


def _callers() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each running function, innermost first."""
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_qualname


def checkpoints_above(entered_by: Callable | None = None) -> int:
    """Return the number of checkpointed functions on the stack.

    Args:
        entered_by: If given, the search ends at the innermost call of this function.
    """
    last = (entered_by.__module__, entered_by.__qualname__) if entered_by is not None else None
    within = itertools.takewhile(lambda running: running != last, _callers())
    return sum(running == CHECKPOINT for running in within)


def custom_forward_above() -> str:
    """Return the name of the running forward of a custom autograd Function within the innermost policy.

    Those of torch (checkpoints, which run the operations again, and compiled code) do not count.

    Returns:
        The qualified name; empty if none runs.
    """
    running = itertools.takewhile(lambda caller: caller[0] != _ENTRY, _callers())
    return next((name for module, name in running if _is_custom_forward(module, name)), "")


@functools.cache
def _is_custom_forward(module: str, name: str) -> bool:
    """Return True if a function is the forward of a custom autograd Function, not of one of torch's."""
    forwards = [each.forward for each in _subclasses(torch.autograd.Function)]
    found = any((each.__module__, getattr(each, "__qualname__", "")) == (module, name) for each in forwards)
    return found and not module.startswith("torch.")


def _subclasses(of: Any) -> Iterator[Any]:
    for each in of.__subclasses__():
        yield each
        yield from _subclasses(each)


def may_be_recomputed() -> bool:
    """Return True if a checkpoint may be running: gradients are disabled, or saved tensors have hooks."""
    if is_traced():
        return False
    return not torch.is_grad_enabled() or hooks_on_saved_tensors(True) is not None


def has_graph() -> bool:
    """Return True if a backward pass may follow: gradients are enabled, or a checkpoint disabled them."""
    return torch.is_grad_enabled() or (not is_traced() and checkpoints_above() > 0)


def active_modes() -> list[Any]:
    """Return this package's modes that are active on this thread, innermost first."""
    modes = [mode_at(index) for index in range(mode_count() - 1, -1, -1)]
    return [mode for mode in modes if hasattr(mode, "table")]


def show_to_compiler(functions: Collection[Function]) -> None:
    """Make the compiler pass calls of these functions to modes, as eager mode does.

    The compiler's own list lacks in-place functions (``torch.relu_``), ``F.sigmoid`` and ``F.tanh``, and it
    never passes the built-in ``abs``. Rules on them would be ignored in compiled code.
    """
    if not COMPILER_IS_KNOWN:
        warn_user(
            f"the compiler of torch {torch.__version__} is not known to gradpolicy: within compiled code, "
            "modules under policies on operations run in eager mode; upgrade gradpolicy"
        )
        return
    known = get_overridable_functions()["gradpolicy"]
    known.extend(set(functions).difference(known))
    in_python = [function for function in functions if isinstance(function, types.FunctionType)]
    if torch.abs in functions:
        importlib.import_module("torch._dynamo")
    if "torch._dynamo" not in sys.modules:
        # It reads the list when it is imported.
        return
    from torch._dynamo import trace_rules, variables

    variables.torch.get_overridable_functions().update(functions)
    _show_builtin_abs(variables)
    for function in in_python:
        if trace_rules.lookup(function) is variables.UserFunctionVariable:
            # Otherwise the compiler would trace into it, and pass only the functions that it calls.
            torch.compiler.allow_in_graph(function)


def as_in_tables(function: Function) -> Function:
    """Return a function, as passed to a mode by the compiler, in the form that is found as a key of dicts.

    For operators that are written in Python the lookup would fail.
    """
    return _OPERATORS.get(_identity(function), function)


@runs_while_tracing
def _identity(function: Function) -> str:
    return str(id(function))


def _show_builtin_abs(variables: Any) -> None:
    tensors, dispatch = variables.tensor.TensorVariable, variables.torch_function
    original = getattr(tensors, "nb_absolute_impl", None)
    if original is None or original.__module__ == __name__:
        return

    def nb_absolute_impl(self: Any, tx: Any) -> Any:
        if dispatch.can_dispatch_torch_function(tx, (self,), {}):
            function = variables.builder.SourcelessBuilder.create(tx, Tensor.abs)
            return dispatch.dispatch_torch_function(tx, function, (self,), {})
        return original(self, tx)

    tensors.nb_absolute_impl = nb_absolute_impl
