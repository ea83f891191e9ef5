"""Rules on the gradients of parameters."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradpolicy.errors import PolicyError
from gradpolicy.flow.autograd_functions import filter_gradient, in_transform, replace_gradient
from gradpolicy.flow.bound_rule import Binding


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is a DTensor; asked without importing torch.distributed.tensor."""
    return hasattr(parameter, "placements") and hasattr(parameter, "device_mesh")


class ParameterRules:
    """The rules on one parameter: a hook that acts on each gradient before that is accumulated.

    A module may come to hold another tensor: a copied module, FSDP2, which puts the whole parameter in the
    place of the sharded one while the module runs, or ``torch.func.functional_call``. So what the module
    holds is looked at in each forward. A parameter gets the hook, any other tensor an alias with the rules.

    Args:
        name: The parameter's qualified name.
        module: The module that holds it.
        attribute: Its name in that module.
        bindings: The rules, in the order in which the gradient meets them.
    """

    def __init__(self, name: str, module: nn.Module, attribute: str, bindings: Sequence[Binding]) -> None:
        self.name = name
        self.module = module
        self.attribute = attribute
        self.bindings = tuple(bindings)
        self.rules = tuple((binding, binding.at(f"parameter {name!r}")) for binding in self.bindings)
        # What the rules act on now; the hooks, each with its tensor and its table of hooks before.
        self._met: Tensor | None = None
        self._handles: list[tuple[Tensor, str, Any, Any]] = []
        self._has_run = False

    def put_on(self) -> None:
        """Hangs the hook on the parameter."""
        self.meet()

    def take_off(self) -> None:
        """Takes the hooks off; the parameters' tables of hooks are then as before."""
        for tensor, table, before, handle in reversed(self._handles):
            handle.remove()
            if before is None and not getattr(tensor, table):
                setattr(tensor, table, None)
        self._handles.clear()
        self._met = None

    def meet(self) -> bool:
        """Sees that the rules act on what the module holds now.

        Returns:
            Whether they need an alias, since what it holds cannot bear hooks.

        Raises:
            PolicyError: If the module no longer has the parameter.
        """
        current = _held(self.module, self.attribute)
        if current is self._met and current is not None:
            return False
        if current is None:
            raise PolicyError(
                f"policy {self.bindings[0].name!r}: parameter {self.name!r} is gone: it was taken away or "
                "parametrised after the policy was installed, and the rule would never run; install it "
                "afterwards"
            )
        if not isinstance(current, nn.Parameter):
            return torch.is_grad_enabled() and (current.requires_grad or in_transform())
        if is_sharded(current):
            self._hang(current, "_post_accumulate_grad_hooks")
        else:
            self._hang(current, "_backward_hooks")
        return False

    def check_traced(self) -> None:
        """Refuses, while ``torch.compile`` traces, what the module holds if the hook is not on that.

        Raises:
            PolicyError: Without fullgraph the compiler then leaves the module to eager mode.
        """
        if _held(self.module, self.attribute) is not self._met:
            raise PolicyError(
                f"policy {self.bindings[0].name!r}: the module holds another tensor for parameter "
                f"{self.name!r} than when the policy was installed, and in compiled code the rule would "
                "never run; install it afterwards, or act at the boundary of its module (modules=)"
            )

    def put_alias(self) -> Callable[[], None]:
        """Gives the module an alias of what it holds, with the rules in its gradient's way.

        Returns:
            What gives the module back what it held.
        """
        original = alias = cast(Tensor, self.module._parameters[self.attribute])
        # The rule put on last is the first that the gradient meets.
        for binding, rule in reversed(self.rules):
            if not binding.active:
                continue
            binding.count(rule.place)
            if binding.rule.gradient_filter is not None:
                alias = filter_gradient(rule, alias)
            else:
                alias = replace_gradient(rule, alias.detach(), [alias])
        return self._exchange(alias, original)

    def _exchange(self, alias: Tensor, original: Tensor) -> Callable[[], None]:
        met_before = self._met
        held: Any = self.module._parameters
        held[self.attribute] = self._met = alias

        def give_back() -> None:
            held[self.attribute], self._met = original, met_before

        return give_back

    def _hang(self, parameter: nn.Parameter, table: str) -> None:
        self._met = parameter
        if any(tensor is parameter for tensor, *_ in self._handles):
            return
        before = getattr(parameter, table)
        if before and all(_is_ours(hook) for hook in before.values()):
            # Another installation made the table; whichever goes last is to leave none.
            before = None
        trains = parameter.requires_grad
        # Torch hangs no hook on a parameter that is frozen now, but keeps one that hangs there already.
        parameter.requires_grad_(True)
        if table == "_backward_hooks":
            handle = parameter.register_hook(functools.partial(self._hook, parameter))
        else:
            # Hooks on a shard never run, but this one does: it sees that the one on the whole parameter did.
            handle = parameter.register_post_accumulate_grad_hook(self._check_shard)
        parameter.requires_grad_(trains)
        self._handles.append((parameter, table, before, handle))

    def _hook(self, parameter: Tensor, grad: Tensor) -> Tensor:
        self._has_run = True
        for binding, rule in self.rules:
            if not binding.active:
                continue
            binding.count(rule.place)
            if binding.rule.gradient_filter is not None:
                grad = rule.filtered(grad)
            else:
                found = rule.gradients(grad, (parameter,), parameter, (True,))[0]
                grad = grad.new_zeros(grad.shape) if found is None else found
        return grad

    def _check_shard(self, parameter: Tensor) -> None:
        has_run, self._has_run = self._has_run, False
        if has_run or not any(binding.active for binding in self.bindings):
            return
        raise PolicyError(
            f"policy {self.bindings[0].name!r}: parameter {self.name!r} is sharded and was used while the "
            "module that holds it did not run, so that the rule could not act on its gradient; use it in the "
            "forward of its module, or act at the boundary of a module (modules=)"
        )

    def __getstate__(self) -> dict:
        # Copies of a parameter come without its hooks.
        return {**self.__dict__, "_met": None, "_handles": [], "_has_run": False}


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(getattr(hook, "func", hook), "__self__", None), ParameterRules)


def _held(module: nn.Module, attribute: str) -> Any:
    # A ScriptModule's table of parameters has no get.
    parameters = module._parameters
    if attribute not in parameters:
        return None
    return parameters[attribute]


def run_with_rules(
    all_rules: Sequence[ParameterRules], forward: Callable[[tuple, dict], Any], args: tuple, kwargs: dict
) -> Any:
    """Runs a forward after a look at what the modules hold; what cannot bear hooks is an alias meanwhile."""
    if torch.compiler.is_compiling():
        for rules in all_rules:
            rules.check_traced()
        return forward(args, kwargs)
    give_backs = [rules.put_alias() for rules in all_rules if rules.meet()]
    if not give_backs:
        return forward(args, kwargs)
    try:
        return forward(args, kwargs)
    finally:
        for give_back in reversed(give_backs):
            give_back()
