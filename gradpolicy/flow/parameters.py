"""Rules on the gradients of parameters."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradpolicy.errors import PolicyError
from gradpolicy.flow.bound_rule import BoundRule, RuleState
from gradpolicy.flow.edges import insert_rule
from gradpolicy.flow.policy_report import Outcome
from gradpolicy.flow.tracing import in_transform


class ParameterRules:
    """The rules on a parameter: a hook that modifies gradients before they are accumulated.

    The module's parameter may be replaced by another tensor: in a copy of the module, by FSDP2, which
    unshards the parameter while the module runs, or by ``torch.func.functional_call``. So it is read in each
    forward. A parameter gets the hook, any other tensor is replaced by an alias with the rules.

    Args:
        name: The parameter's qualified name.
        module: The module.
        attribute: The parameter's name in the module.
        states: The rules in the order in which the backward pass applies them.
    """

    def __init__(self, name: str, module: nn.Module, attribute: str, states: Sequence[RuleState]) -> None:
        self.name = name
        self.module = module
        self.attribute = attribute
        self.policy = states[0].name
        self.bound_rules = tuple(BoundRule(state, f"parameter {name!r}") for state in states)
        # The tensor on which the rules act, and the hooks, each with its tensor.
        self._current: Tensor | None = None
        self._handles: list[tuple[Tensor, Any]] = []
        self._has_run = False

    def take_off(self) -> None:
        """Remove the hooks, and dicts of hooks that are then empty."""
        for tensor, handle in reversed(self._handles):
            handle.remove()
            for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if not getattr(tensor, table):
                    setattr(tensor, table, None)
        self._handles.clear()
        self._current = None

    def put_on(self) -> bool:
        """Register the hook on the module's current parameter.

        Returns:
            True if the rules need an alias instead, because it is not a parameter but another tensor.

        Raises:
            PolicyError: If the module no longer has the parameter; in compiled code, if it is not the one
                with the hook. Without fullgraph, the compiler then runs the module in eager mode.
        """
        current = self._in_module()
        if current is self._current and current is not None:
            return False
        if current is None or torch.compiler.is_compiling():
            raise PolicyError(
                f"policy {self.policy!r}: parameter {self.name!r} is gone: it was taken away or parametrised "
                f"after the policy was installed, or compiled code has another tensor for parameter "
                f"{self.name!r}, so that the rule would never run; install it afterwards, or act at the "
                "boundary of its module (modules=)"
            )
        if not isinstance(current, nn.Parameter):
            return torch.is_grad_enabled() and (current.requires_grad or in_transform())
        self._add_hook(current)
        return False

    def put_alias(self) -> Callable[[], None]:
        """Replace the module's tensor by an alias, with the rules between the two.

        Returns:
            A function that restores the tensor.
        """
        original = alias = cast(Tensor, self.module._parameters[self.attribute])
        # The rule inserted last is the first in the backward pass.
        for bound_rule in reversed(self.bound_rules):
            if bound_rule.state.active:
                bound_rule.state.note(bound_rule.location, Outcome.ACTED)
                alias = insert_rule(bound_rule, alias)
        before = self._current
        parameters: Any = self.module._parameters
        parameters[self.attribute] = self._current = alias

        def put_back() -> None:
            parameters[self.attribute], self._current = original, before

        return put_back

    def _in_module(self) -> Any:
        parameters = self.module._parameters
        # The parameters of a ScriptModule have no method get.
        return parameters[self.attribute] if self.attribute in parameters else None  # noqa: SIM401

    def _add_hook(self, parameter: nn.Parameter) -> None:
        self._current = parameter
        if any(tensor is parameter for tensor, *_ in self._handles):
            return
        trains = parameter.requires_grad
        # torch registers no hook on a frozen parameter, but a parameter keeps its hooks when it is frozen.
        parameter.requires_grad_(True)
        # A DTensor, recognised without importing torch.distributed.tensor.
        if hasattr(parameter, "placements") and hasattr(parameter, "device_mesh"):
            # Other hooks never run on a shard. This one checks that the hook on the unsharded parameter ran.
            handle = parameter.register_post_accumulate_grad_hook(self._check_shard)
        else:
            handle = parameter.register_hook(functools.partial(self._hook, parameter))
        parameter.requires_grad_(trains)
        self._handles.append((parameter, handle))

    def _hook(self, parameter: Tensor, grad: Tensor | None) -> Tensor | None:
        self._has_run = True
        if grad is None:
            # A function that uses the parameter has returned no gradient for it.
            return None
        for bound_rule in self.bound_rules:
            active = bound_rule.state.active
            bound_rule.state.note(bound_rule.location, Outcome.ACTED if active else Outcome.OFF)
            if active:
                found = bound_rule.gradients(grad, (parameter,), parameter, (True,))[0]
                grad = torch.zeros_like(grad) if found is None else found
        return grad

    def _check_shard(self, parameter: Tensor) -> None:
        has_run, self._has_run = self._has_run, False
        if has_run or not any(bound.state.active for bound in self.bound_rules):
            return
        raise PolicyError(
            f"policy {self.policy!r}: parameter {self.name!r} is sharded and was used while the "
            "module that holds it did not run, so that the rule could not act on its gradient; use it in the "
            "forward of its module, or act at the boundary of a module (modules=)"
        )

    def __getstate__(self) -> dict:
        # Copies of a parameter do not have its hooks.
        return {**self.__dict__, "_current": None, "_handles": [], "_has_run": False}


def run_with_rules(
    all_rules: Sequence[ParameterRules], forward: Callable[[tuple, dict], Any], args: tuple, kwargs: dict
) -> Any:
    """Run a forward with the rules on the current parameters of its modules."""
    others = [rules for rules in all_rules if rules.put_on()]
    if not others:
        return forward(args, kwargs)
    with contextlib.ExitStack() as aliases:
        for rules in others:
            aliases.callback(rules.put_alias())
        return forward(args, kwargs)
