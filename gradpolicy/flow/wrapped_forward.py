"""The callables that replace modules' ``forward``, and the state that they share."""

import functools
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _pop_mode, _push_mode

from gradpolicy.errors import PolicyError, warn_user
from gradpolicy.flow.arguments import Signature
from gradpolicy.flow.boundary import Boundary, Through, adopt_writes
from gradpolicy.flow.containers import map_tensors, tensors_in
from gradpolicy.flow.dispatch import (
    DispatchMode,
    DispatchTable,
    checkpoints_above,
    has_graph,
    may_be_recomputed,
    note_taken,
    refusal,
)
from gradpolicy.flow.operation_rule import TableRule
from gradpolicy.flow.parameters import ParameterRules, run_with_rules
from gradpolicy.flow.rule_state import CallScope, RuleState
from gradpolicy.flow.tracing import active_modes, in_transform, is_compiling, mode_at, mode_count, skip_alone

# Whether each rule is active, and the versions of its changing numbers.
Snapshot = tuple[tuple[bool, tuple[int, ...]], ...]


class InstallSession:
    """One installation, and whether its rules are in backward as they were in forward.

    Activation checkpointing runs modules again in the backward pass. If policies were installed, removed or
    switched meanwhile, that run would silently follow other rules than the first, so the backward pass is
    refused. Rules on parameters act when gradients arrive, so for them a removal alone is refused.

    Args:
        states: The rules of the installation.
    """

    def __init__(self, states: Iterable[RuleState] = ()) -> None:
        self.states = tuple(states)
        # Counts the calls of modules within the outermost forward.
        self.scope = CallScope("the outermost forward", ())
        self.is_installed = True
        self.acts_on_parameters = False
        # Whether the outermost module runs with gradients now, and whether any module ever ran.
        self.in_forward = False
        self.has_run = False
        # Whether modules of the running forward pass will run again in its backward pass.
        self._runs_again = False
        # Names of operations that an inner override or policy took.
        self.taken: set[str] = set()
        # The modules that ran with rules on operations inside, but in compiled code.
        self.entered: set[str] = set()

    def matched_operations(self) -> set[str]:
        """Return the names of all operations that a rule of the installation was put on."""
        return {name for state in self.states for name in state.seen.matched}

    def begin_forward(self) -> None:
        """Note that the outermost module starts to run with gradients.

        Raises:
            PolicyError: If it runs for a backward pass whose forward pass ran before the installation.
        """
        if not self.has_run and torch._C._current_graph_task_id() != -1:
            raise _changed("put on")
        self.has_run = self.in_forward = True
        for state in self.states:
            state.note_forward()

    def note_checkpoint(self) -> None:
        """Note in a module whether a checkpoint will run it again in the backward pass.

        A non-reentrant checkpoint, with gradients, only restores saved tensors. Rules that read nothing save
        none, so a second run without them gives the same, or torch finds another number of tensors and says
        so.
        """
        has_gradients = torch.is_grad_enabled()
        if not self.in_forward and not has_gradients:
            # A reentrant checkpoint may stand around the outermost module.
            self.has_run = True
        elif not self._runs_again:
            reads = any(state.rule.reads and not state.filters for state in self.states)
            self._runs_again = (reads or not has_gradients) and checkpoints_above() > 0

    def end_forward(self, result: Any) -> None:
        """Note that the outermost module has run; the backward pass of its result checks the rules."""
        runs_again, self._runs_again, self.in_forward = self._runs_again, False, False
        if not (runs_again or self.acts_on_parameters):
            return
        check = functools.partial(self._check, self._snapshot() if runs_again else None)
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(check)

    def _snapshot(self) -> Snapshot:
        return tuple(
            (state.active, tuple(state.rule.parameters[key]._version for key in state.changing))
            for state in self.states
        )

    def _check(self, snapshot: Snapshot | None, grads: tuple[torch.Tensor, ...]) -> None:
        if snapshot is None:
            if not self.is_installed:
                raise PolicyError(
                    "the policies were removed between forward and backward, and rules on parameters "
                    "(params=) act when the gradients arrive; remove the policies after the backward pass"
                )
        elif not self.is_installed:
            raise _changed("removed")
        elif snapshot != self._snapshot():
            raise _changed("switched, or their schedules went on,")


def _changed(how: str) -> PolicyError:
    return PolicyError(
        f"the policies were {how} between forward and backward, and modules under activation checkpointing "
        "run again in the backward pass, then with other rules than before; change policies between steps"
    )


# By these names, since a look-up of torch._C._… takes time at every layer.
_is_traced = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting
_RELU = nn.ReLU.forward


class InstallMode(DispatchMode):
    """The mode of one installation on one thread. Modules change its table."""

    def __init__(self, session: InstallSession, table: DispatchTable) -> None:
        super().__init__(table, session.taken)
        self.session = session
        self.has_graph = has_graph()

    def check_recomputation(self, rule: TableRule) -> None:
        """Refuse an operation that a checkpoint would run again outside of the wrapped forward.

        A rule for some calls depends on the whole forward in which they are counted.
        """
        entered = CallScope.run if rule.state.calls else WrappedForward._forward
        if self.has_graph and checkpoints_above(entered_by=entered.__code__):
            raise refusal(rule.name)


class WrappedForward:
    """Runs a module's own forward with the rules inside it, at its boundary and on its parameters.

    It stands in the module's ``__dict__``, and can be pickled and copied: a copied module gets a copy of it
    that runs the copy's weights.

    Args:
        module: The module.
        method: The method that it stands for, usually ``"forward"``.
        session: The installation.
        name: The module's name.
        table: The rules on operations inside the module.
        entering: The rules at the module's input.
        leaving: The rules at its output.
        through: The rules across the module.
        scope: Counts calls of operations inside, for rules on some of them.
        parameter_rules: The rules on its parameters; for the whole model, those on all parameters.
        signature: The forward's parameters, if a rule at the module asks for the call.
        is_counted: Whether a rule at the module is for some of its calls only.
    """

    def __init__(
        self,
        module: nn.Module,
        method: str,
        session: InstallSession,
        *,
        name: str = "",
        table: DispatchTable | None = None,
        entering: Boundary | None = None,
        leaving: Boundary | None = None,
        through: Through | None = None,
        scope: CallScope | None = None,
        parameter_rules: Sequence[ParameterRules] = (),
        signature: Signature | None = None,
        is_counted: bool = False,
    ) -> None:
        self.module = module
        self.method = method
        self.session = session
        self.name = name
        self.table = table
        self.entering = entering
        self.leaving = leaving
        self.through = through
        self.scope = scope
        self.parameter_rules = tuple(parameter_rules)
        self.signature = signature
        self.is_counted = is_counted
        # What stood in the module's own __dict__ before: another tool's wrapper, or nothing.
        self.inner: Callable | None = module.__dict__.get(method)
        # The class of a traced module has no forward of its own.
        self.is_script = isinstance(module, torch.jit.ScriptModule)
        forward = getattr(type(module), method, None)
        self.is_relu = forward is _RELU and self.inner is None and scope is None
        acts_at_module = parameter_rules or entering or leaving or through or scope
        self.adds_nothing = table is not None and not acts_at_module

    @property
    def __wrapped__(self) -> Callable:
        """The forward that this stands for. ``inspect.signature`` and Lightning look for it here."""
        if self.inner is not None:
            return self.inner
        if self.is_script:
            return self.module.__getattr__(self.method)  # type: ignore[return-value]
        return getattr(type(self.module), self.method).__get__(self.module)

    @property
    def __code__(self) -> CodeType:
        """The code of the forward, by which torch.export names where its inputs come from."""
        return self.__wrapped__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        mode = mode_at(mode_count() - 1) if self.adds_nothing and mode_count() else None
        if mode is not None and getattr(mode, "table", None) is self.table and not may_be_recomputed():
            # What runs around this forward has the same rules.
            if not _is_traced():
                return self._run_in_mode(mode, args, kwargs)
        elif self.is_script or not _is_exporting():
            if self.parameter_rules:
                return run_with_rules(self.parameter_rules, self._run_in_session, args, kwargs)
            return self._run_in_session(args, kwargs)
        # An exported program has no place for rules: it gets the plain forward, with the plain gradient.
        # As _forward does: the compiler gives up where calls are nested too deeply.
        if self.inner is not None or self.is_script:
            return self.__wrapped__(*args, **kwargs)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)

    def _mode(self) -> InstallMode | None:
        """Return the mode of this installation on this thread."""
        own = (mode for mode in active_modes() if isinstance(mode, InstallMode))
        return next((mode for mode in own if mode.session is self.session), None)

    def put_on(self) -> None:
        """Take the place of the forward."""
        self.module.__dict__[self.method] = self

    def take_off(self) -> None:
        """Return the forward its place back, also from inside wrappers that were put on later."""
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
        # Another tool wrapped this wrapper and keeps it. It can only stop having an effect.
        self.table = self.entering = self.leaving = self.through = None
        self.adds_nothing = False
        warn_user(
            f"{type(self.module).__name__}.{self.method} was replaced while policies were installed; "
            "they are off, but what replaced it still runs through them"
        )

    def _run_in_session(self, args: tuple, kwargs: dict) -> Any:
        session = self.session
        if in_transform():
            for state in session.states:
                state.note_forward()
            return self._run_within_boundaries(args, kwargs)
        if torch.is_grad_enabled() and not session.in_forward:
            return self._run_outermost(args, kwargs)
        if may_be_recomputed():
            session.note_checkpoint()
        return self._run_within_boundaries(args, kwargs)

    def _run_outermost(self, args: tuple, kwargs: dict) -> Any:
        self.session.begin_forward()
        result = None
        try:
            result = self.session.scope.run(self._run_within_boundaries, args, kwargs)
            return result
        finally:
            self.session.end_forward(result)

    def _run_within_boundaries(self, args: tuple, kwargs: dict) -> Any:
        if self.is_counted:
            self._check_countable()
        arguments = None
        if self.signature is not None:
            arguments = self.signature.by_name(*map_tensors(Tensor.detach, (args, kwargs)))
        crossed: list = []
        if self.entering is not None:
            args, kwargs = self.entering.enter(args, kwargs, crossed, arguments)
        versions = [] if in_transform() else [tensor._version for tensor, _ in crossed]
        if self.through is None:
            result = self._run_under_table(args, kwargs)
        else:
            result = self.through.run(self._run_under_table, args, kwargs, arguments)
        if versions:
            adopt_writes(crossed, versions)
        return result if self.leaving is None else self.leaving.leave(result, arguments)

    @skip_alone
    def _check_countable(self) -> None:
        """Refuse to count calls of the module where they cannot be counted.

        Raises:
            PolicyError: Without fullgraph the compiler then leaves the module to eager mode.
        """
        where = ""
        if in_transform():
            where = "in compiled code, or under a transform of torch.func"
        elif self.session.in_forward and may_be_recomputed():
            outermost = WrappedForward._run_outermost.__code__
            if checkpoints_above(entered_by=outermost):
                where = "in a checkpointed function, which runs again in the backward pass"
        if where:
            raise PolicyError(f"module {self.name!r}: calls= cannot count the calls of a module {where}")

    def _run_under_table(self, args: tuple, kwargs: dict) -> Any:
        table, session = self.table, self.session
        if table is None:
            return self._forward(args, kwargs)
        mode = self._mode()
        if mode is None:
            with InstallMode(session, table) as mode:
                result = self._run_in_mode(mode, args, kwargs)
            if not in_transform():
                note_taken(session.matched_operations())
            return result
        outer_table, mode.table = mode.table, table
        try:
            return self._run_in_mode(mode, args, kwargs)
        finally:
            mode.table = outer_table

    def _run_in_mode(self, mode: DispatchMode, args: tuple, kwargs: dict) -> Any:
        # Compiled code is not to depend on the name, so that it serves all modules of a class.
        if is_compiling():
            return self._run_in_scope(args, kwargs)
        self.session.entered.add(self.name)
        outer_module, mode.module = mode.module, self.name
        try:
            if self.is_relu and mode is mode_at(mode_count() - 1):
                return self._call_relu(mode, args, kwargs)
            return self._run_in_scope(args, kwargs)
        finally:
            mode.module = outer_module

    def _run_in_scope(self, args: tuple, kwargs: dict) -> Any:
        return (
            self._forward(args, kwargs) if self.scope is None else self.scope.run(self._forward, args, kwargs)
        )

    def _call_relu(self, mode: DispatchMode, args: tuple, kwargs: dict) -> Any:
        """Hand the call of a ReLU to the mode: the way through torch takes longer than a small ReLU."""
        _pop_mode()
        try:
            return mode.__torch_function__(F.relu, (), args, {**kwargs, "inplace": self.module.inplace})
        finally:
            _push_mode(mode)

    def _forward(self, args: tuple, kwargs: dict) -> Any:
        if self.inner is not None or self.is_script:
            return self.__wrapped__(*args, **kwargs)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)
