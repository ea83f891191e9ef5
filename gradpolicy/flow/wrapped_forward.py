"""The callable that stands in a module's ``forward`` while policies are installed."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradpolicy.flow.autograd_functions import FORWARDS, in_transform
from gradpolicy.flow.bound_rule import note_forward_traced
from gradpolicy.flow.boundary import Boundary, take_over_writes
from gradpolicy.flow.checkpointing import checkpoints_above, has_graph, may_be_recomputed, refusal
from gradpolicy.flow.operations import Function
from gradpolicy.flow.override import CallRule, OperationMode, Table, make_table, tell_those_around
from gradpolicy.flow.parameters import ParameterRules, run_with_rules
from gradpolicy.flow.session import Owner

# By these names, since each look-up of torch._C._… counts in what runs at every layer.
_modes = torch._C._len_torch_function_stack
_mode_at = torch._C._get_function_stack_at


class Scope:
    """The operation rules that hold in a module: one object for all modules with the same ones.

    Args:
        owner: The installation.
        rules: The rules.
    """

    def __init__(self, owner: Owner, rules: Sequence[CallRule]) -> None:
        self.owner = owner
        self.rules = tuple(rules)
        self.table: Table = make_table(self.rules)
        # Every torch function that ran here without a rule for it: the report tells their names.
        self.seen: set[Function] = set()

    def __getstate__(self) -> dict:
        return {"owner": self.owner, "rules": self.rules}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["owner"], state["rules"])  # type: ignore[misc]


class ScopeMode(OperationMode):
    """The mode of one installation on one thread; modules move it from scope to scope."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope.table)
        self.owner = scope.owner
        self.taken = scope.owner.taken
        self.move(scope)
        self.has_graph = has_graph()

    def move(self, scope: Scope) -> None:
        """Lets the rules of a scope hold from now on."""
        self.scope = scope
        self.table = scope.table
        self.seen = scope.seen

    def check_recomputation(self, operation: str) -> None:
        """Refuses an operation that a checkpoint would run again outside of the wrapped forward."""
        if self.has_graph and checkpoints_above(entered_by=_FORWARD):
            raise refusal(operation)


class WrappedForward:
    """Runs a module's own forward within the policies' scope and boundaries.

    It stands in the module's ``__dict__``, holds the module and little else, and can be pickled and copied:
    a copied module gets a copy of it that runs the copy's weights.

    Args:
        module: The module.
        method: The method that it stands for, ``"forward"`` as a rule.
        owner: The installation.
        name: The module's name.
        scope: The operation rules that hold within.
        entering: The rules at the module's input.
        leaving: The rules at its output.
        parameter_rules: The rules on its parameters; those on all parameters, where it is the whole model.
    """

    def __init__(
        self,
        module: nn.Module,
        method: str,
        owner: Owner,
        *,
        name: str = "",
        scope: Scope | None = None,
        entering: Boundary | None = None,
        leaving: Boundary | None = None,
        parameter_rules: Sequence[ParameterRules] = (),
    ) -> None:
        self.module = module
        self.method = method
        self.owner = owner
        self.name = name
        self.scope = scope
        self.entering = entering
        self.leaving = leaving
        self.parameter_rules = tuple(parameter_rules)
        # What stood in the module's own __dict__ before: another tool's wrapper, or nothing.
        self.inner: Callable | None = module.__dict__.get(method)

    @property
    def __wrapped__(self) -> Callable:
        """The forward that this stands for; ``inspect.signature`` and Lightning look for it here."""
        if self.inner is not None:
            return self.inner
        return getattr(type(self.module), self.method).__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward."""
        if self.parameter_rules:
            return run_with_rules(self.parameter_rules, self._run_and_watch, args, kwargs)
        return self._run_and_watch(args, kwargs)

    def _run_and_watch(self, args: tuple, kwargs: dict) -> Any:
        if in_transform():
            if torch.compiler.is_compiling():
                note_forward_traced(self.owner.keys)
            return self._run(args, kwargs)
        owner = self.owner
        if not torch.is_grad_enabled():
            owner.note_checkpoint()
            return self._run(args, kwargs)
        if owner.builds_graph:
            if may_be_recomputed():
                owner.note_other_checkpoint()
            return self._run(args, kwargs)
        owner.begin()
        result = None
        try:
            result = self._run(args, kwargs)
            return result
        finally:
            owner.finish(result)

    def put_on(self) -> None:
        """Takes the forward's place."""
        self.module.__dict__[self.method] = self

    def take_off(self) -> None:
        """Gives the forward its place back, also from under wrappers that were put on later."""
        outer = self.module.__dict__.get(self.method)
        if outer is self:
            if self.inner is None:
                del self.module.__dict__[self.method]
            else:
                self.module.__dict__[self.method] = self.inner
            return
        while isinstance(outer, WrappedForward):
            if outer.inner is self:
                outer.inner = self.inner
                return
            outer = outer.inner
        # Another tool wrapped this one and keeps it: all that can be done is to let everything through.
        self.let_through()
        warnings.warn(
            f"{type(self.module).__name__}.{self.method} was replaced while policies were installed; "
            "they are off, but what replaced it still runs through them",
            stacklevel=2,
        )

    def let_through(self) -> None:
        """Has no effect from now on."""
        self.scope = self.entering = self.leaving = None

    def _run(self, args: tuple, kwargs: dict) -> Any:
        entering, leaving = self.entering, self.leaving
        if entering is None:
            result = self._run_in_scope(args, kwargs)
        elif in_transform():
            args, kwargs = entering.pass_through((args, kwargs))
            result = self._run_in_scope(args, kwargs)
        else:
            crossed: list = []
            args, kwargs = entering.pass_through((args, kwargs), crossed)
            versions = [tensor._version for tensor, _ in crossed]
            result = self._run_in_scope(args, kwargs)
            take_over_writes(crossed, versions)
        return result if leaving is None else leaving.pass_through(result)

    def _run_in_scope(self, args: tuple, kwargs: dict) -> Any:
        scope = self.scope
        if scope is None:
            return self._forward(args, kwargs)
        mode = mode_of(scope.owner)
        if mode is None:
            with ScopeMode(scope):
                result = self._forward(args, kwargs)
            if _modes() and not in_transform():
                tell_those_around(scope.owner.operations_met())
            return result
        outer = mode.scope
        if outer is scope:
            return self._forward(args, kwargs)
        mode.move(scope)
        try:
            return self._forward(args, kwargs)
        finally:
            mode.move(outer)

    def _forward(self, args: tuple, kwargs: dict) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)


def mode_of(owner: Owner) -> ScopeMode | None:
    """The mode of an installation on this thread's stack, if it is there."""
    for place in range(_modes() - 1, -1, -1):
        mode = _mode_at(place)
        if isinstance(mode, ScopeMode) and mode.owner is owner:
            return mode
    return None


_FORWARD = WrappedForward._forward.__code__
FORWARDS.add(_FORWARD)
