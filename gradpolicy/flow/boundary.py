"""Rules at a module's boundary: on every tensor that enters or leaves it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradpolicy.flow.autograd_functions import BackwardRule, filter_gradient, in_transform, replace_gradient
from gradpolicy.flow.bound_rule import Binding
from gradpolicy.flow.containers import kinds_that_hide_tensors, map_tensors


class Boundary:
    """The rules at one side of one module, in the order in which the gradient meets them.

    Args:
        place: Where it is, for messages: ``"input of module 'trunk'"``.
        bindings: The rules.
    """

    def __init__(self, place: str, bindings: Sequence[Binding]) -> None:
        self.place = place
        self.bindings = tuple(bindings)
        # The rule put on last is the first that the gradient meets.
        self.rules = tuple((binding, binding.at(place)) for binding in reversed(self.bindings))
        self._has_looked = False

    def pass_through(self, tree: Any, crossed: list | None = None) -> Any:
        """Gives tensors on, with the rules in their gradient's way.

        Args:
            tree: Tensors in tuples, lists, dicts and dataclasses.
            crossed: Gets the pairs of tensors before and after, where that is asked for.
        """
        if not torch.is_grad_enabled() or not any(binding.active for binding in self.bindings):
            return tree
        result = map_tensors(lambda tensor: self._crossing(tensor, crossed), tree, _can_have_gradient)
        if torch.compiler.is_compiling():
            return result
        if result is tree or not self._has_looked:
            self._has_looked = True
            self._note_hidden(tree)
        return result

    def _note_hidden(self, tree: Any) -> None:
        """Says which objects hold tensors that pass with the plain gradient."""
        for kind in kinds_that_hide_tensors(tree):
            for binding in self.bindings:
                binding.note_unseen(
                    f"{kind} at {self.place}",
                    "tensors are found in tuples, lists, dicts and dataclasses; those in it pass with the "
                    "plain gradient",
                )

    def _crossing(self, tensor: Tensor, crossed: list | None) -> Tensor:
        result = tensor
        for binding, rule in self.rules:
            if binding.active:
                result = _with_rule(result, binding, rule)
                binding.count(self.place)
        if crossed is not None:
            crossed.append((tensor, result))
        return result


def _with_rule(tensor: Tensor, binding: Binding, rule: BackwardRule) -> Tensor:
    # Under torch.compile a copy costs nothing, and an alias that is then written to cannot be traced.
    value = tensor.clone() if torch.compiler.is_compiling() else tensor
    if binding.detaches:
        return value.detach()
    if binding.rule.gradient_filter is not None:
        return filter_gradient(rule, value)
    return replace_gradient(rule, value.detach(), [tensor])


def _can_have_gradient(tensor: Tensor) -> bool:
    floating = tensor.is_floating_point() or tensor.is_complex()
    return floating and (tensor.requires_grad or in_transform())


class TakeOver(Function):
    """Makes a tensor that was written to through an alias a function of that alias.

    A module that works in place on its input (``nn.ReLU(inplace=True)``) gets an alias of it. Whoever uses
    the input afterwards sees the new values; with this also their gradient.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, alias: Tensor) -> Tensor:
        """Gives the tensor, whose values are the alias's already."""
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """The gradient goes the alias's way."""
        return None, grad


def take_over_writes(crossed: list[tuple[Tensor, Tensor]], versions: list[int]) -> None:
    """Lets tensors that a module wrote to through their aliases have the aliases' history."""
    for (tensor, alias), version in zip(crossed, versions, strict=True):
        if tensor._version != version:
            # The values stay, so what was saved of them for the backward pass stays valid.
            with _unsafe_preserve_version_counter(tensor):
                TakeOver.apply(tensor, alias)
