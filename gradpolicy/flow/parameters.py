"""Rules on the gradients of parameters."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradpolicy.errors import PolicyError
from gradpolicy.flow.binding import Binding


class ParameterHook:
    """A rule as a hook on a parameter: it acts on each gradient before that is accumulated.

    Args:
        name: The parameter's name.
        parameter: The parameter.
        binding: The rule.
    """

    def __init__(self, name: str, parameter: nn.Parameter, binding: Binding) -> None:
        if isinstance(parameter, DTensor):
            raise PolicyError(
                f"policy {binding.name!r}: parameter {name!r} is sharded, and hooks on sharded parameters "
                "never run; act at the boundary of its module instead (modules=)"
            )
        self.name = name
        self.parameter = parameter
        self.binding = binding
        self._hooks_before = parameter._backward_hooks
        self._handle = parameter.register_hook(self._hook)

    def _hook(self, grad: Tensor) -> Tensor | None:
        if not self.binding.active:
            return None
        self.binding.count(f"parameter {self.name!r}")
        rule = self.binding.at(f"parameter {self.name!r}")
        if self.binding.rule.gradient_filter is not None:
            return rule.filtered(grad)
        return rule.gradients(grad, (self.parameter,), self.parameter, (True,))[0]

    def remove(self) -> None:
        """Takes the hook off."""
        self._handle.remove()
        if self._hooks_before is None and not self.parameter._backward_hooks:
            parameter: Any = self.parameter
            parameter._backward_hooks = None
