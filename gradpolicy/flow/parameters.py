"""Rules on the gradients of parameters."""

from typing import Any

from torch import Tensor, nn

from gradpolicy.errors import PolicyError
from gradpolicy.flow.binding import Binding


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is a DTensor; asked without importing torch.distributed.tensor."""
    return hasattr(parameter, "placements") and hasattr(parameter, "device_mesh")


class ParameterHook:
    """A rule as a hook on a parameter: it acts on each gradient before that is accumulated.

    Copies of a parameter come without its hooks. So the module that holds the parameter checks at each
    forward that the hook is there, and puts it on where the module is a copy.

    Args:
        name: The parameter's qualified name.
        attribute: Its name in the module that holds it.
        parameter: The parameter.
        binding: The rule.
    """

    def __init__(self, name: str, attribute: str, parameter: nn.Parameter, binding: Binding) -> None:
        if is_sharded(parameter):
            raise PolicyError(
                f"policy {binding.name!r}: parameter {name!r} is sharded, and hooks on sharded parameters "
                "never run; act at the boundary of its module instead (modules=)"
            )
        self.name = name
        self.attribute = attribute
        self.parameter = parameter
        self.binding = binding
        self._handle: Any = None

    def put_on(self) -> None:
        """Hangs the hook on the parameter."""
        self._hooks_before = self.parameter._backward_hooks
        self._handle = self.parameter.register_hook(self._hook)

    def take_off(self) -> None:
        """Takes the hook off; the parameter's table of hooks is then as before."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        if self._hooks_before is None and not self.parameter._backward_hooks:
            parameter: Any = self.parameter
            parameter._backward_hooks = None

    def check(self, module: nn.Module) -> None:
        """Sees that the hook is on the parameter that the module has now.

        Raises:
            PolicyError: If the module has another one, as after sharding.
        """
        if self._handle is None:
            self.put_on()
        if module._parameters.get(self.attribute) is not self.parameter:
            raise PolicyError(
                f"policy {self.binding.name!r}: parameter {self.name!r} was replaced or sharded after the "
                "policy was installed, and the rule would never run; install it afterwards, or act at the "
                "boundary of its module (modules=)"
            )

    def _hook(self, grad: Tensor) -> Tensor | None:
        binding = self.binding
        if not binding.active:
            return None
        place = f"parameter {self.name!r}"
        binding.count(place)
        rule = binding.at(place)
        if binding.rule.gradient_filter is not None:
            return rule.filtered(grad)
        found = rule.gradients(grad, (self.parameter,), self.parameter, (True,))[0]
        return grad.new_zeros(grad.shape) if found is None else found

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_handle": None}
