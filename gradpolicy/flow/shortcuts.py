"""Shorter ways through the modules that policies meet most: ``nn.ReLU`` and ``nn.Sequential``.

A mode costs a little at every torch function that runs under it, and a little more at those with a rule.
Where it is known what a module calls, no mode need look on.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_globals

from gradpolicy.flow.autograd_functions import in_transform
from gradpolicy.flow.known import calls_of
from gradpolicy.flow.operation_rule import OperationRule
from gradpolicy.flow.session import Owner
from gradpolicy.flow.wrapped_forward import Scope, ScopeMode, WrappedForward, mode_of

# By these names, since each look-up of torch._C._… counts in what runs at every layer.
_relu = torch.relu
_is_compiling = torch.compiler.is_dynamo_compiling
_in_functorch = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_function_stack
_mode_at = torch._C._get_function_stack_at
_pop_mode = torch._C._pop_torch_function_stack
_push_mode = torch._C._push_on_torch_function_stack

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FORWARD, _BEFORE_FORWARD, _BACKWARD, _BEFORE_BACKWARD = _HOOKS


class WrappedReLU(WrappedForward):
    """The forward of a ``nn.ReLU``: no look-up, one hook.

    Args:
        module: The ReLU.
        owner: The installation.
        scope: The operation rules that hold within.
        rule: The one among them that is for ReLUs.
        name: The module's name.
    """

    def __init__(
        self, module: nn.Module, owner: Owner, scope: Scope, rule: OperationRule, *, name: str = ""
    ) -> None:
        super().__init__(module, "forward", owner, name=name, scope=scope)
        self.rule: OperationRule | None = rule

    def __call__(self, input: Tensor) -> Tensor:
        """Runs the ReLU."""
        if _is_compiling() or _in_functorch() or forward_ad._current_level >= 0:
            return super().__call__(input)
        depth = _modes()
        if depth == 0:
            return self.rectified(input)
        mode = _mode_at(0)
        if depth > 1 or type(mode) is not ScopeMode or mode.owner is not self.owner:
            return super().__call__(input)
        # The installation's own mode would only find the same rule.
        _pop_mode()
        try:
            return self.rectified(input)
        finally:
            _push_mode(mode)

    def rectified(self, input: Tensor) -> Tensor:
        """Runs the ReLU where nobody looks on: no mode, no compiler, no ``torch.func``."""
        if self.module.inplace:
            return super().__call__(input)
        result = _relu(input)
        node: Any = result.grad_fn
        rule = self.rule
        if rule is None:
            return result
        binding = rule.binding
        if node is None or not binding.active:
            self._note_without_rule(rule, node)
            return result
        (node.register_hook if rule.rectifies else node.register_prehook)(rule.hook)
        binding.relus += 1
        return result

    def let_through(self) -> None:
        """Has no effect from now on."""
        super().let_through()
        self.rule = None

    def _note_without_rule(self, rule: OperationRule, node: Any) -> None:
        """Notes a ReLU whose rule is off, or that ran where no gradient is asked for."""
        if rule.binding.active:
            rule.binding.meet("relu")
        elif self.scope is not None:
            self.scope.seen.add(F.relu)
        if node is None and not torch.is_grad_enabled():
            # A checkpoint may run it again, then for gradients.
            self.owner.note_checkpoint()


class WrappedSequence(WrappedForward):
    """The forward of a ``nn.Sequential`` whose parts are known, or have a wrapped forward of their own.

    Then it calls nothing that a rule could be for, and needs no mode.
    """

    _parts: "Parts | None" = None

    def _run_in_scope(self, args: tuple, kwargs: dict) -> Any:
        if in_transform() or kwargs or len(args) != 1 or self.inner is not None or self.scope is None:
            return super()._run_in_scope(args, kwargs)
        if self._parts is None:
            self._parts = Parts(self.module, self.scope)
        if not self._parts.are_as_found():
            return super()._run_in_scope(args, kwargs)
        if not _modes():
            return self._parts.run(*args)
        if mode_of(self.owner) is None or _modes() > 1:
            return super()._run_in_scope(args, kwargs)
        mode = _pop_mode()
        try:
            return self._parts.run(*args)
        finally:
            _push_mode(mode)

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "_parts"}


class Parts:
    """The parts of a ``nn.Sequential`` as they were found, and the shortest way through each.

    Args:
        sequence: The ``nn.Sequential``.
        scope: The operation rules that hold within.
    """

    def __init__(self, sequence: nn.Module, scope: Scope) -> None:
        self.children = sequence._modules
        self.found = list(self.children.values())
        parts = [part for part in self.found if part is not None]
        self.types = [type(part) for part in parts]
        self.dicts = [part.__dict__ for part in parts]
        self.forwards = [own.get("forward") for own in self.dicts]
        self.steps = [_shortest(part) for part in parts]
        self.are_known = len(parts) == len(self.found) and all(_needs_no_mode(part, scope) for part in parts)

    def run(self, input: Any) -> Any:
        """Runs the parts one after the other."""
        for step in self.steps:
            input = step(input)
        return input

    def are_as_found(self) -> bool:
        """Whether the parts are known, are still the same, and nothing else hangs on them."""
        if not self.are_known or any(getattr(module_globals, f"_global{name}") for name in _HOOKS):
            return False
        for own in self.dicts:
            if own[_FORWARD] or own[_BEFORE_FORWARD] or own[_BACKWARD] or own[_BEFORE_BACKWARD]:
                return False
        return (
            list(self.children.values()) == self.found
            and list(map(type, self.found)) == self.types
            and [own.get("forward") for own in self.dicts] == self.forwards
        )


def _needs_no_mode(part: nn.Module, scope: Scope) -> bool:
    forward = part.__dict__.get("forward")
    if isinstance(forward, WrappedForward):
        return forward.owner is scope.owner and forward.inner is None
    calls = calls_of(part)
    return calls is not None and not any(call in scope.table for call in calls)


def _shortest(part: nn.Module) -> Callable[[Any], Any]:
    forward = part.__dict__.get("forward")
    return forward.rectified if isinstance(forward, WrappedReLU) else part
